//! [`with_mesh`]: the current mesh of a thread.

use std::cell::RefCell;

use super::{DeviceMesh, MeshError};
use crate::Result;

thread_local! {
    /// Stack of the current meshes, innermost last.
    static CURRENT: RefCell<Vec<DeviceMesh>> = const { RefCell::new(Vec::new()) };
}

/// Runs `program` with `mesh` as the calling thread's [current mesh](DeviceMesh::current), so that
/// deeply nested code can read it without a parameter. Calls may be nested. The scope ends with
/// `program`, also if it unwinds. Local.
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
/// Nothing in this crate uses the current mesh implicitly: the mesh of a tensor or model is always
/// an explicit argument.
pub fn with_mesh<T>(mesh: &DeviceMesh, program: impl FnOnce() -> T) -> T {
    /// Guard that removes the current mesh when dropped.
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
    /// Returns the mesh of the innermost [`with_mesh`] around the caller, on the same thread.
    /// Local.
    ///
    /// # Errors
    /// [`NoCurrent`](MeshError::NoCurrent) if there is none.
    pub fn current() -> Result<Self> {
        Ok(CURRENT
            .with_borrow(|current| current.last().cloned())
            .ok_or(MeshError::NoCurrent)?)
    }
}
