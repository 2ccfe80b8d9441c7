//! [`prepared_of`]: what the plan says of a module, found with the parameters inside it.

use std::sync::Arc;

use burn::module::Module;

use super::prepare::ModuleIoLayouts;
use super::visit::walk;
use crate::mesh::DeviceMesh;

/// What a module's parameters know of it.
pub(crate) struct Prepared {
    /// The mesh they are parallelized on, if any is.
    pub(crate) mesh: Option<DeviceMesh>,
    /// What the plan says of the module, if anything.
    pub(crate) layouts: Option<Arc<ModuleIoLayouts>>,
}

/// What the parameters inside `module` know of it.
pub(crate) fn prepared_of<M: Module>(module: &M) -> Prepared {
    let distributed = walk(module).distributed;
    let mut parallel =
        distributed.iter().filter_map(|found| Some((found.depth, found.param.info().parallel.as_ref()?)));
    let Some((depth, first)) = parallel.next() else { return Prepared { mesh: None, layouts: None } };
    // All parameters of the module know alike; of a part of what it was, all that are left do.
    let own = first.modules.iter().find(|(above, _)| *above == depth);
    Prepared { mesh: Some(first.spec.mesh().clone()), layouts: own.map(|(_, layouts)| layouts.clone()) }
}
