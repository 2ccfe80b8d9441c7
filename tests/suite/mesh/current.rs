//! The mesh that a part of a program is on.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_dtensor::Error;
use burn_dtensor::mesh::{DeviceMesh, MeshError, with_mesh};

use super::{error_of, on};

fn none() {
    let error = error_of(DeviceMesh::current());
    assert!(
        matches!(error, Error::Mesh(MeshError::NoCurrent)),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("`with_mesh(&mesh, || ..)`"),
        "{error}"
    );
}

#[test]
fn the_innermost_scope_around_the_caller_has_the_current_mesh() {
    on(4, |world| {
        none();
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let tp = mesh.slice("tp")?;
        with_mesh(&mesh, || {
            assert_eq!(DeviceMesh::current()?, mesh);
            with_mesh(&tp, || {
                assert_eq!(DeviceMesh::current()?, tp);
                // Of this thread, as ranks are.
                std::thread::scope(|scope| scope.spawn(none).join().expect("no panic"));
                Ok::<_, Error>(())
            })?;
            assert_eq!(DeviceMesh::current()?, mesh);
            // An early return and a panic end the scope.
            let left: Result<(), Error> = with_mesh(&tp, || Err(Error::other("early")));
            assert!(left.is_err());
            assert!(
                catch_unwind(AssertUnwindSafe(|| with_mesh(&tp, || panic!(
                    "in the scope"
                ))))
                .is_err()
            );
            assert_eq!(DeviceMesh::current()?, mesh);
            Ok::<_, Error>(())
        })?;
        none();
        Ok(())
    });
}
