//! Mixed precision by hand, without units: weights cast as layers read them, gradients averaged in
//! an element type.

use burn::module::{Module, ModuleVisitor, Param, Reparameterization, Reparameterizer};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use burn_dtensor::comm::{Call, ReduceOp};
use burn_dtensor::mesh::DeviceMesh;

/// A weight that layers read in another element type, by burn's own cast.
#[derive(Module, Debug)]
pub struct Cast {
    #[module(skip)]
    dtype: DType,
}

impl Reparameterization for Cast {
    const NAME: &'static str = "cast";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base.cast(self.dtype)
    }
}

/// Casts the weights at these paths.
struct Weights<F>(F);

impl<F: Fn(&str) -> Option<DType>> Reparameterizer for Weights<F> {
    type Reparam = Cast;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Cast>) {
        (param, (self.0)(path).map(|dtype| Cast { dtype }))
    }
}

/// The model whose layers read each weight in the element type of its path.
pub fn with_weights_in<M: Module>(model: M, dtype: impl Fn(&str) -> Option<DType>) -> M {
    model.apply_reparameterization(Weights(dtype))
}

/// Averages the gradients of all ranks, each in the element type of its path: over the last mesh
/// dimension first, as shards are reduced before replicas. They are then of the stored element type
/// again.
pub fn average<M: Module>(
    model: &M,
    grads: GradientsParams,
    mesh: &DeviceMesh,
    dtype: impl Fn(&str) -> DType,
) -> GradientsParams {
    let mut average = Average {
        path: Vec::new(),
        mesh,
        dtype,
        grads,
    };
    model.visit(&mut average);
    average.grads
}

struct Average<'a, F> {
    path: Vec<String>,
    mesh: &'a DeviceMesh,
    dtype: F,
    grads: GradientsParams,
}

impl<F: Fn(&str) -> DType> ModuleVisitor for Average<'_, F> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = self
            .grads
            .remove::<D>(param.id)
            .expect("every parameter is used");
        let mut grad = grad
            .cast((self.dtype)(&self.path.join(".")))
            .into_dispatch();
        for dim in (0..self.mesh.ndim()).rev() {
            let group = self.mesh.communicator(dim).unwrap();
            grad = group
                .all_reduce(Call::new("by hand"), vec![grad], ReduceOp::Avg)
                .wait()
                .unwrap()
                .remove(0);
        }
        self.grads.register(
            param.id,
            Tensor::<D>::from_dispatch(grad).cast(param.base().dtype()),
        );
    }
}
