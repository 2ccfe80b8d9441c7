//! [`mesh_test!`](crate::mesh_test): a test that runs on each backend.

/// Defines a test that runs on a mesh of ranks as threads and, if this crate is built with its
/// feature `mpi`, on a mesh of ranks as processes.
///
/// `mesh_test!(name, shape, dimension names, body)` defines the tests `name::threads` and
/// `name::processes`, the latter with one process per rank. They are a
/// [`MeshTest`](crate::testing::MeshTest) and a `ProcessMeshTest`. The body runs on each rank and
/// makes its assertions there. It is in a separate module that imports everything from the
/// surrounding one. Processes take about a second to start.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_dtensor::comm::ReduceOp;
/// use burn_dtensor::mesh_test;
///
/// mesh_test!(rows_are_summed, [2, 2], ["dp", "tp"], |mesh| {
///     let own = Tensor::<1>::full([3], mesh.rank() as f32, mesh.device());
///     let sum = mesh.slice("tp")?.all_reduce(own, ReduceOp::Sum)?;
///     let expected = if mesh.rank() < 2 { 1.0 } else { 5.0 };
///     assert_eq!(sum.into_data().try_to_vec::<f32>()?, [expected; 3]);
///     Ok(())
/// });
/// ```
#[macro_export]
macro_rules! mesh_test {
    ($(#[$attribute:meta])* $name:ident, $shape:expr, $names:expr, $body:expr $(,)?) => {
        $(#[$attribute])*
        mod $name {
            use super::*;

            #[test]
            fn threads() {
                $crate::testing::MeshTest::new($shape, $names).run($body);
            }

            $crate::__mesh_test_on_processes!($shape, $names, $body);
        }
    };
}

/// Defines the test with processes. A separate macro is needed because the feature `mpi` of this
/// crate is known only here, not where `mesh_test!` is used.
#[cfg(feature = "mpi")]
#[doc(hidden)]
#[macro_export]
macro_rules! __mesh_test_on_processes {
    ($shape:expr, $names:expr, $body:expr) => {
        #[test]
        fn processes() {
            let test = $crate::testing::MeshTest::new($shape, $names);
            let ranks = test.ranks();
            test.with_processes(ranks).run($body);
        }
    };
}

#[cfg(not(feature = "mpi"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __mesh_test_on_processes {
    ($($test:tt)*) => {};
}
