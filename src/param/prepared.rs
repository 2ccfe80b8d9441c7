//! [`prepared_of`]: the input and output layouts that a plan declares for a module, found through the parameters
//! inside it.

use std::sync::Arc;

use burn::module::Module;

use super::prepare::ModuleIoLayouts;
use super::visit::walk;
use crate::mesh::DeviceMesh;

/// Information about a module that its parameters carry.
pub(crate) struct Prepared {
    /// The mesh on which its parameters are parallelized, if any of them is.
    pub(crate) mesh: Option<DeviceMesh>,
    /// The input and output layouts that the plan declares for the module, if any.
    pub(crate) layouts: Option<Arc<ModuleIoLayouts>>,
}

/// Returns the mesh and the layouts that the parameters inside `module` carry.
pub(crate) fn prepared_of<M: Module>(module: &M) -> Prepared {
    let distributed = walk(module).distributed;
    let mut parallel =
        distributed.iter().filter_map(|found| Some((found.depth, found.param.info().parallel.as_ref()?)));
    let Some((depth, first)) = parallel.next() else { return Prepared { mesh: None, layouts: None } };
    // Every parameter carries the layouts of all modules around it, so the first one is as good as any other.
    let own = first.modules.iter().find(|(above, _)| *above == depth);
    Prepared { mesh: Some(first.spec.mesh().clone()), layouts: own.map(|(_, layouts)| layouts.clone()) }
}
