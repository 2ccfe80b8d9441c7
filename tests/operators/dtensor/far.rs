//! What an extremum leaves out may be as far from it as it likes, and does not show.

use burn::tensor::{Tensor, TensorData};
use burn_dtensor::dtensor::ops::activation;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use Placement::Partial;

type Function = fn(DTensor<1>) -> DTensor<1>;

/// Increasing ones.
const FUNCTIONS: &[(&str, Function)] = &[
    ("sign", |x| x.sign()),
    ("exp", |x| x.exp()),
    ("log", |x| x.log()),
    ("log1p", |x| x.log1p()),
    ("sqrt", |x| x.sqrt()),
    ("erf", |x| x.erf()),
    ("floor", |x| x.floor()),
    ("sinh", |x| x.sinh()),
    ("asinh", |x| x.asinh()),
    ("acosh", |x| x.acosh()),
    ("atan", |x| x.atan()),
    ("tanh", |x| x.tanh()),
    ("clamp", |x| x.clamp(1.1, 1.3)),
    ("relu", activation::relu),
    ("relu6", activation::relu6),
    ("leaky_relu", |x| activation::leaky_relu(x, 0.1)),
    ("leaky_relu, flat", |x| activation::leaky_relu(x, 0.0)),
    ("thresholded_relu", |x| activation::thresholded_relu(x, 0.5)),
    ("threshold", |x| activation::threshold(x, 0.5, 0.1)),
    ("sigmoid", activation::sigmoid),
    ("log_sigmoid", activation::log_sigmoid),
    ("hard_sigmoid", |x| activation::hard_sigmoid(x, 0.2, 0.5)),
    ("tanhshrink", activation::tanhshrink),
    ("hardtanh", |x| activation::hardtanh(x, -1.0, 1.0)),
    ("softsign", activation::softsign),
    ("softplus", |x| activation::softplus(x, 1.0)),
    ("softplus_with_threshold", |x| {
        activation::softplus_with_threshold(x, 1.0, 20.0)
    }),
    ("elu", |x| activation::elu(x, 1.0)),
    ("celu", |x| activation::celu(x, 1.0)),
    ("selu", activation::selu),
    ("hard_shrink", |x| activation::hard_shrink(x, 0.5)),
    ("soft_shrink", |x| activation::soft_shrink(x, 0.5)),
    ("shrink", |x| activation::shrink(x, 0.5, 0.2)),
];

fn values(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("floats")
}

/// An infinity is what a rank without elements has of an extremum.
#[test]
fn terms_far_from_the_extremum_do_not_show() {
    let extremum = [1.2, 1.4, 3.0];
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let (rank, leaf) = (mesh.rank(), |values| {
            Tensor::<1>::from_data(TensorData::new(values, [3]), &device).require_grad()
        });
        for (name, function) in FUNCTIONS {
            let complete = leaf(extremum.to_vec());
            let full = function(DTensor::from_local(
                complete.clone(),
                mesh,
                &[Placement::Replicate],
            )?)
            .full_tensor()?;
            let grad = values(
                complete
                    .grad(&full.clone().sum().backward())
                    .expect("a gradient"),
            );
            for (op, towards) in [(PartialOp::Max, -1.0), (PartialOp::Min, 1.0)] {
                for far in [200.0, 1e30, f32::INFINITY] {
                    let local = leaf(if rank == 0 {
                        extremum.to_vec()
                    } else {
                        vec![towards * far; 3]
                    });
                    let y = function(DTensor::from_local(local.clone(), mesh, &[Partial(op)])?)
                        .full_tensor()?;
                    let found =
                        values(local.grad(&y.clone().sum().backward()).expect("a gradient"));
                    let case = format!("{name} of P({op}) with terms at {}", towards * far);
                    assert_eq!(values(y), values(full.clone()), "{case}");
                    assert_eq!(
                        found,
                        if rank == 0 {
                            grad.clone()
                        } else {
                            vec![0.0; 3]
                        },
                        "gradient of {case}"
                    );
                }
            }
        }
        Ok(())
    });
}
