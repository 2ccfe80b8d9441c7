//! [`with_mesh`]: the mesh that a part of a program is on.

use std::cell::RefCell;

use super::{DeviceMesh, MeshError};
use crate::Result;

thread_local! {
    /// Innermost last.
    static CURRENT: RefCell<Vec<DeviceMesh>> = const { RefCell::new(Vec::new()) };
}

/// Runs `program` with `mesh` as the calling thread's [current mesh](DeviceMesh::current), which code deep
/// inside reads where no argument brings it. Scopes nest, and end with `program`, also when it unwinds. Local.
///
/// ```
/// use burn_dtensor::prelude::*;
///
/// fn positions(len: i64) -> Result<DTensor<1, burn::tensor::Int>> {
///     let mesh = DeviceMesh::current()?;
///     DTensor::arange(0..len, &mesh, &[Placement::Shard(0)], mesh.device())
/// }
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["sp"])?;
///     let positions = with_mesh(&mesh, || positions(6))?;
///     assert_eq!(positions.local().dims(), [3]);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Nothing takes the current mesh by itself: what a tensor or a model lies on is written where it is made.
pub fn with_mesh<T>(mesh: &DeviceMesh, program: impl FnOnce() -> T) -> T {
    /// Ends the scope.
    struct MeshScope;
    impl Drop for MeshScope {
        fn drop(&mut self) {
            CURRENT.with_borrow_mut(Vec::pop);
        }
    }
    CURRENT.with_borrow_mut(|current| current.push(mesh.clone()));
    let _scope = MeshScope;
    program()
}

impl DeviceMesh {
    /// The mesh of the innermost [`with_mesh`] around the caller, on the same thread.
    ///
    /// # Errors
    /// [`NoCurrent`](MeshError::NoCurrent) outside of any.
    pub fn current() -> Result<Self> {
        Ok(CURRENT.with_borrow(|current| current.last().cloned()).ok_or(MeshError::NoCurrent)?)
    }
}
