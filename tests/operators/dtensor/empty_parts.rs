//! A rank may have nothing of a tensor without being the last: 7 over 2 x 3 ranks, both cutting
//! it, are 2, 2, 0 and 1, 1, 1.

use burn::tensor::ops::PadMode;
use burn::tensor::{DType, Device, Int, Tensor, s};
use burn_dtensor::Result;
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::activation;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::graph_depth;

use super::{R, S, on_mesh, part, ramp, values};

/// A leaf of the whole, and one of this rank's part of it.
fn leaves<const D: usize>(
    shape: [usize; D],
    mesh: &DeviceMesh,
    placements: &[Placement],
) -> Result<(Tensor<D>, DTensor<D>)> {
    let full = || ramp(shape, 1.0, &Device::flex().autodiff()).require_grad();
    Ok((
        full(),
        DTensor::distribute_replicated(full(), mesh, placements)?,
    ))
}

#[test]
fn a_rank_in_the_middle_without_elements_spoils_no_reduction() {
    for (mesh, len) in [([2, 3], 7), ([2, 4], 9), ([2, 4], 17), ([3, 3], 11)] {
        on_mesh(&mesh, |_, mesh| {
            let ones = || DTensor::<1>::ones([len], mesh, &[S(0), S(0)], mesh.device());
            assert_eq!(values(ones()?.mean().full_tensor()?), [1.0]);
            assert_eq!(values(ones()?.max().full_tensor()?), [1.0]);
            assert_eq!(values(ones()?.min().full_tensor()?), [1.0]);
            assert_eq!(values(ones()?.var_bias(0).full_tensor()?), [0.0]);
            Ok(())
        });
    }
}

/// Operators that record nothing on a part without elements, which is why they get none.
#[test]
fn a_rank_in_the_middle_without_elements_stays_in_step() {
    let depths = on_mesh(&[2, 3], |_, mesh| {
        let ((x, own_x), (y, own_y)) = (
            leaves([7], mesh, &[S(0), S(0)])?,
            leaves([7, 2], mesh, &[S(0), S(0)])?,
        );
        let full = x.clone().flip([0]).slice_fill(s![1..2], 0.0).square().sum()
            + y.clone().sort(1).triu(0).sum();
        let expected = full.clone().backward();
        let (left, left_depth) = graph_depth(own_x.clone().flip([0]).slice_fill(s![1..2], 0.0));
        let (right, right_depth) = graph_depth(own_y.clone().sort(1).triu(0));
        let own = (left.square().sum() + right.sum()).full_tensor()?;
        assert_eq!(values(own.clone()), values(full));
        let grads = own.backward();
        assert_eq!(
            values(own_x.local().grad(&grads).unwrap()),
            part(x.grad(&expected).unwrap(), &own_x)
        );
        assert_eq!(
            values(own_y.local().grad(&grads).unwrap()),
            part(y.grad(&expected).unwrap(), &own_y)
        );
        Ok([left_depth, right_depth].map(|depth| depth.get().expect("backward has come by")))
    });
    assert_eq!(depths, [depths[0]; 6]);
}

/// Here no dimension is cut twice by the program.
#[test]
fn no_operator_makes_a_rank_without_elements_by_itself() {
    on_mesh(&[2, 3], |_, mesh| {
        let (x, own_x) = leaves([7, 1], mesh, &[R, S(1)])?;
        assert_eq!(
            values(own_x.clone().mean().full_tensor()?),
            values(x.clone().mean())
        );
        assert_eq!(values(own_x.max().full_tensor()?), values(x.max()));
        let (x, own_x) = leaves([7, 5], mesh, &[R, S(1)])?;
        let expected = x.clone().median(1).sum().backward();
        let grads = own_x.clone().median(1).full_tensor()?.sum().backward();
        assert_eq!(
            values(own_x.local().grad(&grads).unwrap()),
            part(x.grad(&expected).unwrap(), &own_x)
        );
        Ok(())
    });
}

/// burn aborts on some of them, and answers others outside the graph.
#[test]
fn an_operator_of_a_tensor_without_elements_is_in_its_graph() {
    type Operator = fn(DTensor<2>) -> DTensor<2>;
    let operators: [(&str, Operator, [usize; 2]); 13] = [
        ("cat", |x| DTensor::cat(vec![x.clone(), x], 1), [0, 6]),
        ("cross", |x| x.clone().cross(x, 1), [0, 3]),
        ("flip", |x| x.flip([1]), [0, 3]),
        ("roll", |x| x.roll(&[1], &[1]), [0, 3]),
        ("pad", |x| x.pad([(1, 1)], PadMode::Constant(1.5)), [0, 5]),
        ("slice", |x| x.slice([0..0, 1..3]), [0, 2]),
        ("slice_fill", |x| x.slice_fill([0..0, 1..3], 1.0), [0, 3]),
        (
            "slice_assign",
            |x| x.clone().slice_assign([0..0, 1..3], x.slice([0..0, 0..2])),
            [0, 3],
        ),
        ("split", |x| x.split(2, 1).remove(0), [0, 2]),
        ("triu", |x| x.triu(1), [0, 3]),
        (
            "select_dim",
            |x| x.select_dim::<1>(1, 2).unsqueeze_dim(1),
            [0, 1],
        ),
        ("softmax", |x| activation::softmax(x, 1), [0, 3]),
        ("sort", |x| x.sort_with_indices(1).0, [0, 3]),
    ];
    for (name, operator, shape) in operators {
        for placement in [R, S(0), S(1)] {
            on_mesh(&[2], |_, mesh| {
                let device = Device::flex().autodiff();
                let leaf = DTensor::distribute_replicated(
                    Tensor::<2>::zeros([0, 3], &device),
                    mesh,
                    &[placement],
                )?
                .require_grad();
                let y = operator(leaf.clone());
                assert_eq!(y.dims(), shape, "{name} of {placement}");
                let grads = y.full_tensor()?.sum().backward();
                let grad = leaf
                    .local()
                    .grad(&grads)
                    .unwrap_or_else(|| panic!("{name} of {placement} left the graph"));
                assert_eq!(grad.dims(), leaf.local().dims(), "{name} of {placement}");
                Ok(())
            });
        }
    }
}

/// burn chooses the type by operator and backend. The truth is its choice for a tensor with elements.
#[test]
fn indices_in_an_empty_tensor_of_integers_have_the_type_of_others() {
    macro_rules! check {
        ($mesh:ident $dtype:ident; $($name:literal: |$x:ident| $indices:expr;)*) => {$(
            let zeros = |rows: usize| Tensor::<2, Int>::zeros([rows, 3], ($mesh.device(), $dtype));
            let $x = zeros(2);
            let expected = $indices.dtype();
            for placement in [R, S(0), S(1)] {
                let $x = DTensor::distribute_replicated(zeros(0), $mesh, &[placement])?;
                let found = $indices;
                let name = format!("{} of {:?} by {placement}", $name, $dtype);
                assert_eq!(found.dtype(), expected, "{name}");
                assert_eq!(found.local().dtype(), expected, "{name}");
                assert_eq!(found.full_tensor()?.dtype(), expected, "{name}");
            }
        )*};
    }
    on_mesh(&[2], |_, mesh| {
        for dtype in [DType::I64, DType::I32, DType::I8, DType::U8] {
            check! {
                mesh dtype;
                "argmax": |x| x.argmax(1);
                "argmin": |x| x.argmin(1);
                "max_dim_with_indices": |x| x.max_dim_with_indices(1).1;
                "min_dim_with_indices": |x| x.min_dim_with_indices(1).1;
                "argsort": |x| x.argsort(1);
                "argsort_descending": |x| x.argsort_descending(1);
                "sort_with_indices": |x| x.sort_with_indices(1).1;
                "sort_descending_with_indices": |x| x.sort_descending_with_indices(1).1;
                "topk_with_indices": |x| x.topk_with_indices(2, 1).1;
                "argtopk": |x| x.argtopk(2, 1);
            }
        }
        Ok(())
    });
}
