//! Operators refuse what burn's own panics at, as a typed error that says what would fit.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::signal::StftOptions;
use burn::tensor::grid::IndexPos;
use burn::tensor::ops::GridSampleOptions;
use burn::tensor::{Bool, Device, Float, IndexingUpdateOp, Int, Shape};
use burn_dtensor::Error;
use burn_dtensor::dtensor::ops::{grid, linalg, signal};
use burn_dtensor::dtensor::{DTensor, DTensorError};

use super::{R, S, error_of, on_mesh};

/// Runs each expression and holds its error to the operator and the text.
macro_rules! refused {
    ($($operator:literal $says:literal $expr:expr;)*) => {$(
        let ended = catch_unwind(AssertUnwindSafe(|| { let _ = $expr; }));
        let error = *ended.expect_err($operator).downcast::<Error>().expect($operator);
        assert!(matches!(error, Error::DTensor(DTensorError::Operands { operator: $operator, .. })), "{error:?}");
        assert!(error.to_string().contains($says), "{error}");
    )*};
}

#[test]
fn what_does_not_fit_is_told_what_would() {
    on_mesh(&[2], |_, mesh| {
        let device = Device::flex();
        let x = || DTensor::<2>::ones([4, 6], mesh, &[S(0)], &device).expect("it fits");
        let x3 = || DTensor::<3>::ones([2, 4, 6], mesh, &[S(2)], &device).expect("it fits");
        let row = || DTensor::<1>::ones([6], mesh, &[R], &device).expect("it fits");
        let i = || DTensor::<2, Int>::ones([3, 2], mesh, &[R], &device).expect("it fits");
        let far = || DTensor::<2, Int>::ones([3, 4], mesh, &[R], &device).expect("it fits");
        let mask = || DTensor::<1, Bool>::ones([4], mesh, &[R], &device).expect("it fits");
        let tracked = || {
            DTensor::<2>::ones([4, 6], mesh, &[R], &device.clone().autodiff())
                .expect("it fits")
                .require_grad()
        };
        let add = IndexingUpdateOp::Add;
        refused! {
            "reshape" "lengths whose product is 24" x().reshape([5, 5]);
            "reshape" "at most one -1" x().reshape([-1, -1]);
            "reshape" "do not fit its 24 elements" x().reshape([-1, 5]);
            "reshape" "one of the 2 dimensions" x().reshape([4, 6, 0]);
            "slice" "Pass at most 2" x().slice([0..1, 0..1, 0..1]);
            "slice_assign" "Pass at most 2" x().slice_assign([0..1, 0..1, 0..1], x());
            "slice_fill" "Pass at most 2" x().slice_fill([0..1, 0..1, 0..1], 1.0);
            "expand" "each at least 1" x().expand([0, 6]);
            "expand" "-1 to keep a" x().expand([-1, 4, 6]);
            "expand" "at least 2 lengths" x().expand([6]);
            "expand" "has 3 dimensions, but 2 were requested" x().expand::<2, _>(Shape::from([2, 4, 6]));
            "movedim" "different ones in -2..2" x().movedim(0, 2);
            "movedim" "different ones in -2..2" x().movedim(vec![0, -2], vec![0, 1]);
            "flip" "[0, 0] are not different. Pass each axis once" x().flip([0, -2]);
            "into_scalar" "Reduce the tensor first" x().into_scalar::<f32>();
            "cov" "at least 2 dimensions" row().cov(0, 1);
            "mask_select" "the shape of the tensor" row().mask_select(mask());
            "gather_nd" "has 1 dimensions, but 2 were requested" x().gather_nd::<2, 2>(i());
            "gather_nd" "Use tuples of 1 to 3" x3().gather_nd::<2, 0>(far());
            "scatter_nd" "Use tuples of 1 to 2" x().scatter_nd(far(), row(), add);
            "scatter_nd" "the slices that the indices select" x().scatter_nd(i(), row(), add);
            "gather_nd" "it is for numbers only" x().is_nan().gather_nd::<2, 1>(i());
            "scatter_nd" "it is for numbers only" x().is_nan().scatter_nd(i(), mask(), add);
            "unfold" "at least 1 element, not 0" x().unfold::<3, _>(0, 0, 1);
            "unfold" "apart, not 0" x().unfold::<3, _>(0, 2, 0);
            "unfold" "has 3 dimensions, but 2 were requested" x().unfold::<2, _>(0, 2, 1);
            "unfold" "dimension 2 is out of range for 2" x().unfold::<3, _>(2, 2, 1);
            "categorical" "at least 1 sample, not 0" x().categorical(0);
            "meshgrid_stack" "has 3 dimensions, but 2 were requested" grid::meshgrid_stack::<2, 2, Float>(&[row(), row()], IndexPos::First);
            "affine_grid_2d" "must be [3, 2, 3]" grid::affine_grid_2d(x3(), [3, 1, 2, 2]);
            "grid_sample_2d" "images have 4 dimensions" x3().grid_sample_2d(x3(), GridSampleOptions::default());
            "matvec" "one less than the matrices" linalg::matvec::<2, 2, Float>(x(), x());
            "outer_dim" "has 2 dimensions, but 3 were requested" linalg::outer::<1, 3, Float>(row(), row());
            "diag" "these have 2" linalg::diag::<2, 2, Float>(x());
            "trace" "these have 1" linalg::trace::<1, 1>(row());
            "lu" "these have 3" linalg::lu::<3, 1>(x3());
            "qr" "these have 1" linalg::qr(row(), true);
            "det" "square matrices" linalg::det::<3, 2, 1>(x3());
            "svd" "at least 1 sweep, not 0" linalg::svd::<2, 1>(x(), 0);
            "svd" "matrices that need no gradient" linalg::svd::<2, 1>(tracked(), 3);
            "rfft" "of 6 elements is not supported. Set `n` to a power of two" signal::rfft(x(), 1, None);
            "irfft" "of 10 elements is not supported. Set `n` to a power of two" signal::irfft(x(), x(), 1, None);
            "cfft" "must have equal shapes" signal::cfft(x(), x().slice_dim(0, 0..2), 0, Some(4));
            "stft" "`n_fft` must be a power of two" signal::stft(x(), None, StftOptions::new(6));
            "stft" "too short for frames of 16" signal::stft(x(), None, StftOptions::new(16));
            "stft" "the window must have 4 elements" signal::stft(x(), Some(row()), StftOptions::new(4));
            "istft" "[batch, frames, 3, 2]" signal::istft(x3().unsqueeze_dim::<4>(3), None, None, StftOptions::new(4));
        }
        for error in [
            error_of(DTensor::<2>::zeros([4], mesh, &[S(1)], &device)),
            error_of(DTensor::<1>::ones([4, 4], mesh, &[R], &device)),
            error_of(DTensor::<1, Int>::arange_step(0..4, 0, mesh, &[R], &device)),
            error_of(DTensor::<2, Int>::cartesian_grid::<_, 2>(
                [2, 2],
                mesh,
                &[R],
                &device,
            )),
            error_of(DTensor::<3, Int>::cartesian_grid::<_, 4>(
                [2, 2],
                mesh,
                &[R],
                &device,
            )),
        ] {
            assert!(
                matches!(error, Error::DTensor(DTensorError::Operands { .. })),
                "{error:?}"
            );
        }
        Ok(())
    });
}
