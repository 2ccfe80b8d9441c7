//! Calls of operators on DTensors of any rank and kind, under one type.

use burn::tensor::{Bool, Gradients, Int, Tensor, TensorData};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{Layout, PartialOp, Placement};
use burn_dtensor::{Error, Result};

use super::file::{Case, Operator, Values};

/// A row of the table: an operator by torch's name for its case.
pub type Row = (&'static str, Box<dyn Call>);

/// Runs an operator on the inputs of a case.
pub trait Call {
    fn call(&self, feed: &mut Feed<'_>) -> Result<Vec<Box<dyn Output>>>;
}

/// `f`, whose arguments say what to build of the golden inputs.
pub fn op<A: 'static, F: Function<A> + 'static>(f: F) -> Box<dyn Call> {
    struct Of<F, A>(F, std::marker::PhantomData<A>);
    impl<A, F: Function<A>> Call for Of<F, A> {
        fn call(&self, feed: &mut Feed<'_>) -> Result<Vec<Box<dyn Output>>> {
            self.0.apply(feed)
        }
    }
    Box::new(Of(f, std::marker::PhantomData))
}

/// Functions of golden inputs.
pub trait Function<A> {
    fn apply(&self, feed: &mut Feed<'_>) -> Result<Vec<Box<dyn Output>>>;
}

macro_rules! functions {
    ($($A:ident)*) => {
        impl<$($A: Argument,)* O: Outputs, F: Fn($($A),*) -> O> Function<($($A,)*)> for F {
            #[allow(non_snake_case)]
            fn apply(&self, feed: &mut Feed<'_>) -> Result<Vec<Box<dyn Output>>> {
                $(let $A = $A::next(feed)?;)*
                feed.mesh.world().ledger().reset();
                Ok(self($($A),*).outputs())
            }
        }
    };
}

functions!(A);
functions!(A B);
functions!(A B C);
functions!(A B C D);

/// Hands a case's inputs to a function, one by one.
pub struct Feed<'a> {
    mesh: &'a DeviceMesh,
    operator: &'a Operator,
    case: &'a Case,
    taken: usize,
    /// Local gradients of the inputs taken; `None` for those that have none.
    pub gradients: Vec<Option<Gradient>>,
}

/// Reads the local gradient of an input.
type Gradient = Box<dyn Fn(&Gradients) -> Values>;

impl<'a> Feed<'a> {
    pub fn new(mesh: &'a DeviceMesh, operator: &'a Operator, case: &'a Case) -> Self {
        Self {
            mesh,
            operator,
            case,
            taken: 0,
            gradients: vec![],
        }
    }

    /// The layout of the next input, its global shape and this rank's values.
    fn next(&mut self) -> Result<(Layout, Vec<usize>, Values)> {
        let input = self
            .operator
            .inputs
            .get(self.taken)
            .ok_or_else(|| Error::other("more arguments than inputs"))?;
        let layout = super::super::layout(&self.case.mesh, &self.case.in_pl[self.taken])?;
        self.taken += 1;
        let coordinate = self.mesh.coordinate().expect("every rank is in the mesh");
        let (shape, mut values) = super::super::part(
            &input.values(),
            &layout.local_slices(&input.shape, coordinate),
        );
        // Terms of the value: rank c of n has 2 (c + 1) / (n (n + 1)) of a sum, n times that of an
        // average; below a maximum it falls short by n - 1 - c.
        for ((&size, &c), placement) in self
            .case
            .mesh
            .iter()
            .zip(coordinate)
            .zip(layout.placements())
        {
            let (n, c) = (size as f32, c as f32);
            let share = 2.0 * (c + 1.0) / (n * (n + 1.0));
            let local = |value: f32| match placement {
                Placement::Partial(PartialOp::Sum) => value * share,
                Placement::Partial(PartialOp::Avg) => value * (n * share),
                Placement::Partial(PartialOp::Max) => value - (n - 1.0 - c),
                Placement::Partial(op) => panic!("no convention for {op:?}"),
                _ => value,
            };
            values
                .iter_mut()
                .for_each(|value| *value = f64::from(local(*value as f32)));
        }
        Ok((layout, input.shape.clone(), (shape, values)))
    }
}

/// What a function takes.
pub trait Argument: Sized + 'static {
    fn next(feed: &mut Feed<'_>) -> Result<Self>;
}

fn check_rank<const D: usize>(shape: &[usize]) -> Result<()> {
    match shape.len() {
        dims if dims == D => Ok(()),
        dims => Err(Error::other(format!(
            "the table has a row for {D} dimensions, the input has {dims}"
        ))),
    }
}

impl<const D: usize> Argument for DTensor<D> {
    fn next(feed: &mut Feed<'_>) -> Result<Self> {
        let (layout, global, (shape, values)) = feed.next()?;
        check_rank::<D>(&global)?;
        let data = TensorData::new(
            values.into_iter().map(|x| x as f32).collect::<Vec<_>>(),
            shape,
        );
        let leaf =
            Tensor::<D>::from_data(data, &feed.mesh.device().clone().autodiff()).require_grad();
        let held = leaf.clone();
        feed.gradients.push(Some(Box::new(move |grads| {
            // A tensor that the loss does not depend on has no gradient.
            held.grad(grads).map_or_else(
                || (held.dims().to_vec(), vec![0.0; held.shape().num_elements()]),
                values_of,
            )
        })));
        DTensor::from_local_with_layout(leaf, feed.mesh, layout, global)
    }
}

impl<const D: usize> Argument for DTensor<D, Int> {
    fn next(feed: &mut Feed<'_>) -> Result<Self> {
        let (layout, global, (shape, values)) = feed.next()?;
        check_rank::<D>(&global)?;
        let data = TensorData::new(
            values.into_iter().map(|x| x as i64).collect::<Vec<_>>(),
            shape,
        );
        feed.gradients.push(None);
        let local = Tensor::<D, Int>::from_data(data, &feed.mesh.device().clone().autodiff());
        DTensor::from_local_with_layout(local, feed.mesh, layout, global)
    }
}

/// The shape of the first output: the argument of a reshape, the length of a slice.
pub struct Wanted<const D: usize>(pub [usize; D]);

impl<const D: usize> Argument for Wanted<D> {
    fn next(feed: &mut Feed<'_>) -> Result<Self> {
        let shape = feed
            .operator
            .shape()
            .ok_or_else(|| Error::other("no output to take the shape of"))?;
        check_rank::<D>(&shape)?;
        Ok(Self(shape.try_into().expect("just checked")))
    }
}

/// One output.
pub trait Output {
    /// The layout and the local values.
    fn local(&self) -> (Layout, Values);

    /// The full value, and its term of the loss: with output `k`, `sum(full * w_k)` with
    /// `w_k[i] = (((7 i + 3 + 2 k) mod 11) - 5) / 4`.
    fn full(&self, k: usize) -> Result<(Values, Option<Tensor<1>>)>;
}

impl<const D: usize> Output for DTensor<D> {
    fn local(&self) -> (Layout, Values) {
        (self.layout().clone(), values_of(self.local().clone()))
    }

    fn full(&self, k: usize) -> Result<(Values, Option<Tensor<1>>)> {
        let full = self.clone().full_tensor()?;
        let weights =
            (0..full.shape().num_elements()).map(|i| ((7 * i + 3 + 2 * k) % 11) as f32 - 5.0);
        let weights = TensorData::new(weights.map(|w| w / 4.0).collect::<Vec<_>>(), full.shape());
        let weights = Tensor::<D>::from_data(weights, (&full.device(), full.dtype()));
        Ok((
            values_of(full.clone()),
            full.is_tracked().then(|| (full * weights).sum()),
        ))
    }
}

macro_rules! without_gradient {
    ($($K:ident)*) => {$(
        impl<const D: usize> Output for DTensor<D, $K> {
            fn local(&self) -> (Layout, Values) {
                (self.layout().clone(), values_of(self.local().clone()))
            }

            fn full(&self, _: usize) -> Result<(Values, Option<Tensor<1>>)> {
                Ok((values_of(self.clone().full_tensor()?), None))
            }
        }
    )*};
}

without_gradient!(Int Bool);

/// What a function returns.
pub trait Outputs {
    fn outputs(self) -> Vec<Box<dyn Output>>;
}

impl<O: Output + 'static> Outputs for O {
    fn outputs(self) -> Vec<Box<dyn Output>> {
        vec![Box::new(self)]
    }
}

impl<O: Output + 'static> Outputs for Vec<O> {
    fn outputs(self) -> Vec<Box<dyn Output>> {
        self.into_iter()
            .map(|output| Box::new(output) as _)
            .collect()
    }
}

impl<A: Output + 'static, B: Output + 'static> Outputs for (A, B) {
    fn outputs(self) -> Vec<Box<dyn Output>> {
        vec![Box::new(self.0), Box::new(self.1)]
    }
}

fn values_of<const D: usize, K: burn_dtensor::dtensor::Kind>(tensor: Tensor<D, K>) -> Values {
    let shape = tensor.dims().to_vec();
    (shape, tensor.into_data().iter::<f64>().collect())
}
