//! What a laid-out tensor means, from the arrays of all ranks: the definition, element by element.

use burn_dtensor::placement::{Layout, PartialOp, Placement};

use super::redistribute::Array;

/// A tensor as all ranks hold it. Rank `r` sits at the `r`-th coordinate of the mesh, row-major.
pub struct Model {
    layout: Layout,
    shape: Vec<usize>,
    locals: Vec<Array>,
}

impl Model {
    pub fn new(layout: Layout, shape: &[usize], locals: Vec<Array>) -> Result<Self, String> {
        let model = Self {
            layout,
            shape: shape.to_vec(),
            locals,
        };
        for (rank, (found, _)) in model.locals.iter().enumerate() {
            let expected = model.layout.local_shape(shape, &model.coordinate(rank));
            if *found != expected {
                return Err(format!(
                    "rank {rank}: shape {found:?}, expected {expected:?}"
                ));
            }
        }
        Ok(model)
    }

    fn coordinate(&self, mut rank: usize) -> Vec<usize> {
        let mut coordinate = vec![0; self.layout.mesh_shape().len()];
        for (index, size) in coordinate.iter_mut().zip(self.layout.mesh_shape()).rev() {
            *index = rank % size;
            rank /= size;
        }
        coordinate
    }

    fn rank(&self, coordinate: &[usize]) -> usize {
        let sizes = self.layout.mesh_shape().iter();
        coordinate
            .iter()
            .zip(sizes)
            .fold(0, |rank, (index, size)| rank * size + index)
    }

    /// The value at `element` on `rank`, if it holds that element.
    fn get(&self, rank: usize, element: &[usize]) -> Option<f32> {
        let slices = self
            .layout
            .local_slices(&self.shape, &self.coordinate(rank));
        let mut at = 0;
        for (index, slice) in element.iter().zip(&slices) {
            if !slice.contains(index) {
                return None;
            }
            at = at * slice.len() + index - slice.start;
        }
        Some(self.locals[rank].1[at])
    }

    /// Row-major multi-indices of a shape.
    fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
        (0..shape.iter().product()).map(move |mut flat: usize| {
            let mut index = vec![0; shape.len()];
            for (digit, len) in index.iter_mut().zip(shape).rev() {
                *digit = flat % len;
                flat /= len;
            }
            index
        })
    }

    /// Ranks that differ from `rank` along `dims` only, itself among them.
    fn along(&self, rank: usize, dims: &[usize]) -> Vec<usize> {
        let own = self.coordinate(rank);
        let same = |other: &usize| {
            let other = self.coordinate(*other);
            (0..own.len()).all(|dim| dims.contains(&dim) || own[dim] == other[dim])
        };
        (0..self.locals.len()).filter(same).collect()
    }

    /// The tensor's value: replicas agree, partial values are reduced.
    pub fn full(&self) -> Vec<f32> {
        let placements = self.layout.placements();
        let partial: Vec<usize> = (0..placements.len())
            .filter(|&dim| placements[dim].partial_op().is_some())
            .collect();
        let value = |element: Vec<usize>| {
            let holds = |rank: &usize| self.get(*rank, &element).is_some();
            let first = (0..self.locals.len())
                .find(holds)
                .expect("some rank holds every element");
            let terms = self
                .along(first, &partial)
                .into_iter()
                .filter_map(|rank| self.get(rank, &element));
            let terms: Vec<f32> = terms.collect();
            let Some(&dim) = partial.first() else {
                return terms[0];
            };
            let averaged = partial
                .iter()
                .filter(|&&dim| placements[dim] == Placement::Partial(PartialOp::Avg));
            let divisor: usize = averaged.map(|&dim| self.layout.mesh_shape()[dim]).product();
            reduce(placements[dim].partial_op().unwrap(), &terms) / divisor as f32
        };
        Self::indices(&self.shape).map(value).collect()
    }

    /// Ranks that differ only along replicated dimensions must hold the same.
    pub fn check_replicas(&self) -> Result<(), String> {
        let placements = self.layout.placements();
        for rank in 0..self.locals.len() {
            let mut coordinate = self.coordinate(rank);
            for (index, placement) in coordinate.iter_mut().zip(placements) {
                if placement.is_replicate() {
                    *index = 0;
                }
            }
            let first = self.rank(&coordinate);
            if self.locals[first] != self.locals[rank] {
                return Err(format!("ranks {first} and {rank} differ"));
            }
        }
        Ok(())
    }

    /// The derivative of `sum(upstream * value)` by `rank`'s array, where `reduced` mesh dimensions
    /// are reduced. Several answers, where extrema over several dimensions may be found in several
    /// orders and ranks tie.
    pub fn gradients(
        &self,
        rank: usize,
        reduced: &[(usize, PartialOp)],
        upstream: &[f32],
    ) -> Vec<Vec<f32>> {
        let dims: Vec<usize> = reduced.iter().map(|(dim, _)| *dim).collect();
        let slices = self
            .layout
            .local_slices(&self.shape, &self.coordinate(rank));
        let lens: Vec<usize> = slices.iter().map(|slice| slice.len()).collect();
        let grad = |order: &[usize]| {
            let element = |local: Vec<usize>| -> Vec<usize> {
                local
                    .iter()
                    .zip(&slices)
                    .map(|(index, slice)| slice.start + index)
                    .collect()
            };
            let one = |local| {
                let element: Vec<usize> = element(local);
                let flat = element
                    .iter()
                    .zip(&self.shape)
                    .fold(0, |at, (index, len)| at * len + index);
                upstream[flat] * self.derivative(rank, reduced, order, &element)
            };
            Self::indices(&lens).map(one).collect()
        };
        orders(&dims).iter().map(|order| grad(order)).collect()
    }

    fn derivative(
        &self,
        rank: usize,
        reduced: &[(usize, PartialOp)],
        order: &[usize],
        element: &[usize],
    ) -> f32 {
        let Some(&(_, op)) = reduced.first() else {
            return 1.0;
        };
        let value = |rank: usize| {
            self.get(rank, element)
                .expect("partial ranks hold the same elements")
        };
        match op {
            PartialOp::Sum | PartialOp::Avg => {
                let averaged = reduced.iter().filter(|(_, op)| *op == PartialOp::Avg);
                1.0 / averaged
                    .map(|&(dim, _)| self.layout.mesh_shape()[dim])
                    .product::<usize>() as f32
            }
            // A product is linear in each factor: the difference quotient is the derivative.
            PartialOp::Product => {
                let product = |own: f32| -> f32 {
                    let factor = |&other: &usize| if other == rank { own } else { value(other) };
                    self.along(rank, order).iter().map(factor).product()
                };
                product(1.0) - product(0.0)
            }
            PartialOp::Max | PartialOp::Min => {
                let mut share = 1.0;
                for (at, dim) in order.iter().enumerate() {
                    let extremum = |rank: usize| {
                        reduce(
                            op,
                            &self
                                .along(rank, &order[..at])
                                .into_iter()
                                .map(value)
                                .collect::<Vec<_>>(),
                        )
                    };
                    let line: Vec<f32> = self
                        .along(rank, &[*dim])
                        .into_iter()
                        .map(extremum)
                        .collect();
                    let best = reduce(op, &line);
                    let holders = line.iter().filter(|&&value| value == best).count();
                    share *= if extremum(rank) == best {
                        1.0 / holders as f32
                    } else {
                        0.0
                    };
                }
                share
            }
        }
    }
}

fn reduce(op: PartialOp, values: &[f32]) -> f32 {
    let values = values.iter().copied();
    match op {
        PartialOp::Sum | PartialOp::Avg => values.sum(),
        PartialOp::Product => values.product(),
        PartialOp::Min => values.fold(f32::INFINITY, f32::min),
        PartialOp::Max => values.fold(f32::NEG_INFINITY, f32::max),
    }
}

/// All orders of `dims`.
fn orders(dims: &[usize]) -> Vec<Vec<usize>> {
    if dims.is_empty() {
        return vec![vec![]];
    }
    let with_first = |at: usize| {
        let mut rest = dims.to_vec();
        let first = rest.remove(at);
        orders(&rest)
            .into_iter()
            .map(move |order| [vec![first], order].concat())
    };
    (0..dims.len()).flat_map(with_first).collect()
}
