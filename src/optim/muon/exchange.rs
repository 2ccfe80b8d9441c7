//! Moves matrices to their owners, orthogonalizes them there, and moves the results back.

use std::ops::Range;
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::{LearningRate, Muon, Optimizer};
use burn::tensor::{Device, Tensor};
use itertools::Itertools;

use super::join::{joined, shaped};
use super::rounds::rounds;
use crate::Result;
use crate::comm::{Call, TensorMeta};
use crate::dtensor::{DTensorSpec, own};
use crate::optim::route::Route;
use crate::param::Unit;

/// A matrix to orthogonalize.
pub(in crate::optim) struct MuonMatrix {
    pub(in crate::optim) id: ParamId,
    pub(in crate::optim) path: Arc<str>,
    /// Spec of the parameter, in the dtype of `part`; `None` if it is not distributed.
    pub(in crate::optim) spec: Option<Arc<DTensorSpec>>,
    /// This rank's shard of the output of momentum.
    pub(in crate::optim) part: Tensor<2>,
    pub(in crate::optim) lr: LearningRate,
    /// burn's Muon without momentum and weight decay, for full matrices.
    pub(in crate::optim) muon: Arc<Muon>,
}

/// A parameter, and the update to add to this rank's shard of it.
pub(in crate::optim) type MuonUpdate = (ParamId, Tensor<2>);

/// Computes the updates of all `matrices` of the model with these units.
///
/// # Collective
/// Every rank of the parameters' meshes must call it. Each round takes two all-to-alls along each
/// mesh dimension that shards the matrices. Replicated matrices need no communication.
pub(in crate::optim) fn orthogonalized(
    matrices: Vec<MuonMatrix>,
    units: &[Arc<Unit>],
) -> Result<Vec<MuonUpdate>> {
    let mut routes: Vec<Route> = Vec::new();
    let mut groups: Vec<Vec<Owned>> = Vec::new();
    let mut steps = Vec::new();
    for matrix in matrices {
        let Some(spec) = matrix.spec.clone() else {
            steps.push((matrix.id, matrix.step(matrix.part.clone())));
            continue;
        };
        let device = matrix.part.device();
        let known = routes.iter().zip(&groups).position(|(route, group)| {
            route.takes(&spec) && group[0].matrix.part.device() == device
        });
        let route = match known {
            Some(known) => known,
            None => {
                routes.push(Route::of(&spec)?);
                groups.push(Vec::new());
                routes.len() - 1
            }
        };
        groups[route].push(Owned {
            matrix,
            spec,
            owner: Vec::new(),
        });
    }
    for (route, matrices) in routes.iter().zip(groups) {
        let shapes = matrices
            .iter()
            .map(|owned| owned.spec.shape().dims())
            .collect_vec();
        let mut matrices = matrices.into_iter().map(Some).collect_vec();
        for round in rounds(&shapes, route.ranks()) {
            let owned = |(matrix, owner): (usize, usize)| {
                let owned = matrices[matrix]
                    .take()
                    .expect("each matrix is in one round");
                Owned {
                    owner: route.place(owner),
                    ..owned
                }
            };
            let matrices = round.into_iter().map(owned).collect_vec();
            steps.extend(
                MuonRound {
                    route,
                    matrices: &matrices,
                    units,
                }
                .run()?,
            );
        }
    }
    Ok(steps)
}

impl MuonMatrix {
    /// Returns the update that burn's Muon adds to the full parameter, computed from the full
    /// matrix.
    fn step(&self, full: Tensor<2>) -> Tensor<2> {
        // Steps an expanded zero, which takes no memory, so that the result is the update itself.
        let nothing =
            Tensor::<2>::zeros([1, 1], (&full.device(), full.dtype())).expand(full.dims());
        self.muon.step(self.lr, nothing, full, None).0
    }
}

/// A matrix sharded over several ranks, and the coordinates of its owner along the axes of the
/// route.
struct Owned {
    matrix: MuonMatrix,
    spec: Arc<DTensorSpec>,
    owner: Vec<usize>,
}

/// Matrices of one route and on one device that are moved in the same all-to-alls.
struct MuonRound<'a> {
    route: &'a Route,
    matrices: &'a [Owned],
    units: &'a [Arc<Unit>],
}

/// A matrix and the shards of it that this rank holds, flat, in the order of [`Route::sources`].
type HeldShards<'a> = (&'a Owned, Vec<Tensor<1>>);

impl<'a> MuonRound<'a> {
    fn run(&self) -> Result<Vec<MuonUpdate>> {
        let mut held: Vec<HeldShards> = self
            .matrices
            .iter()
            .map(|owned| (owned, vec![flat(&owned.matrix.part)]))
            .collect();
        for axis in 0..self.route.axes() {
            held = self.to_owners(axis, held)?;
        }
        held = held
            .into_iter()
            .map(|(owned, parts)| (owned, self.step(owned, parts)))
            .collect();
        for axis in (0..self.route.axes()).rev() {
            held = self.back(axis, held)?;
        }
        let part = |(owned, mut parts): HeldShards| {
            let part = shaped(
                parts.pop().expect("each rank gets one shard back"),
                owned.spec.local_shape().dims(),
            );
            // A view would keep the memory of the full matrix alive.
            (
                owned.matrix.id,
                Tensor::from_dispatch(own(part.into_dispatch())),
            )
        };
        Ok(held.into_iter().map(part).collect())
    }

    /// Computes a matrix's update on its owner and splits it into shards.
    fn step(&self, owned: &Owned, parts: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
        let regions = self.route.regions(&owned.spec);
        let step = owned
            .matrix
            .step(joined(regions.iter().cloned().zip(parts)));
        let part = |region: Vec<Range<usize>>| {
            let [rows, columns] = region.try_into().expect("a matrix has two dimensions");
            flat(&step.clone().slice([rows, columns]))
        };
        regions.into_iter().map(part).collect()
    }

    /// Sends the held shards along an axis, to the ranks with the coordinates of the owners.
    fn to_owners(&self, axis: usize, held: Vec<HeldShards<'a>>) -> Result<Vec<HeldShards<'a>>> {
        let own = self.route.own(axis);
        let mut given = vec![Vec::new(); self.route.size(axis)];
        let mut stay = Vec::new();
        for (owned, parts) in held {
            given[owned.owner[axis]].extend(parts);
            stay.extend((owned.owner[axis] == own).then_some(owned));
        }
        let lengths = |from| {
            stay.iter()
                .flat_map(move |owned| self.lengths(owned, axis, from))
                .collect()
        };
        let lengths = (0..given.len()).map(lengths).collect();
        let mut taken = self.exchange(axis, given, lengths)?;
        let each = self.route.sources_before(axis);
        Ok(stay
            .into_iter()
            .map(|owned| {
                (
                    owned,
                    taken
                        .iter_mut()
                        .flat_map(|parts| parts.take(each))
                        .collect(),
                )
            })
            .collect())
    }

    /// Sends the updates back along an axis, to the ranks from which [`to_owners`](Self::to_owners)
    /// received the shards.
    fn back(&self, axis: usize, held: Vec<HeldShards<'a>>) -> Result<Vec<HeldShards<'a>>> {
        let each = self.route.sources_before(axis);
        let mut given = vec![Vec::new(); self.route.size(axis)];
        for (_, parts) in held {
            for (given, parts) in given.iter_mut().zip(&parts.into_iter().chunks(each)) {
                given.extend(parts);
            }
        }
        // Matrices whose shards this rank held before the move along this axis.
        let here = self
            .matrices
            .iter()
            .filter(|owned| (0..axis).all(|axis| owned.owner[axis] == self.route.own(axis)));
        let here = here.collect_vec();
        let own = self.route.own(axis);
        let lengths = |from| {
            let theirs = here.iter().filter(move |owned| owned.owner[axis] == from);
            theirs
                .flat_map(|owned| self.lengths(owned, axis, own))
                .collect()
        };
        let lengths = (0..given.len()).map(lengths).collect();
        let mut taken = self.exchange(axis, given, lengths)?;
        Ok(here
            .into_iter()
            .map(|owned| {
                (
                    owned,
                    taken[owned.owner[axis]].by_ref().take(each).collect(),
                )
            })
            .collect())
    }

    /// Returns the numbers of elements of the shards of a matrix that the rank at `place` along an
    /// axis holds before the move along that axis.
    fn lengths(&self, owned: &Owned, axis: usize, place: usize) -> Vec<usize> {
        let sources = self.route.sources(axis, place);
        sources
            .map(|coordinate| owned.spec.local_shape_at(&coordinate).num_elements())
            .collect()
    }

    /// Sends the tensors `given[i]` to rank `i` along an axis, and receives from each rank tensors
    /// with the given lengths.
    fn exchange(
        &self,
        axis: usize,
        given: Vec<Vec<Tensor<1>>>,
        lengths: Vec<Vec<usize>>,
    ) -> Result<Vec<std::vec::IntoIter<Tensor<1>>>> {
        let names = self.matrices.iter().map(|owned| owned.matrix.path.clone());
        let dtype = self.route.dtype();
        let meta = |lengths: &Vec<usize>| {
            let len = lengths.iter().sum::<usize>();
            (len > 0).then(|| TensorMeta {
                shape: [len].into(),
                dtype,
            })
        };
        let metas = lengths.iter().map(meta).collect();
        let given = given
            .into_iter()
            .map(|parts| Some(together(parts)?.into_dispatch()))
            .collect();
        let communicator = self.route.communicator(axis);
        let model = Unit::model_over(self.units.iter().map(AsRef::as_ref), communicator);
        let call = Call {
            model,
            ..Call::new("muon").with_names(names)
        };
        let work = communicator.all_to_all_list(call, given, metas);
        // Of a rank that gave nothing, they are on its own device, also if the matrices are in host
        // memory.
        let device = self.device();
        let moved = |taken: Tensor<1>| {
            if taken.device() == device {
                taken
            } else {
                taken.to_device(&device)
            }
        };
        let taken = work
            .wait()?
            .into_iter()
            .map(|taken| taken.map(|taken| moved(Tensor::from_dispatch(taken))));
        Ok(taken
            .zip(lengths)
            .map(|(taken, lengths)| self.apart(taken, &lengths).into_iter())
            .collect())
    }

    /// Returns the device of the matrices.
    fn device(&self) -> Device {
        self.matrices[0].matrix.part.device()
    }

    fn apart(&self, together: Option<Tensor<1>>, lengths: &[usize]) -> Vec<Tensor<1>> {
        let device = self.device();
        let mut start = 0;
        let part = |&len: &usize| {
            start += len;
            match &together {
                Some(together) if len > 0 => together.clone().narrow(0, start - len, len),
                _ => Tensor::zeros([0], (&device, self.route.dtype())),
            }
        };
        lengths.iter().map(part).collect()
    }
}

fn flat(part: &Tensor<2>) -> Tensor<1> {
    match part.shape().num_elements() {
        // burn's `reshape` interprets 0 as "keep this dimension".
        0 => Tensor::zeros([0], (&part.device(), part.dtype())),
        len => part.clone().reshape([len]),
    }
}

/// Concatenates all tensors that have elements; `None` if none has.
fn together(parts: Vec<Tensor<1>>) -> Option<Tensor<1>> {
    let mut parts = parts
        .into_iter()
        .filter(|part| part.dims() != [0])
        .collect_vec();
    match parts.len() {
        0 | 1 => parts.pop(),
        _ => Some(Tensor::cat(parts, 0)),
    }
}
