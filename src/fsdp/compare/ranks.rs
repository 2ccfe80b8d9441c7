//! [`Ranks`]: the ranks that compare a model, and the parameters that they compare.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchAutodiffContext, DispatchTensor, TensorMetadata};
use burn::module::Module;
use burn::tensor::DType;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::report::{Comparison, Finding, Side};
use super::run::{Panicked, Run, ShardRanges};
use crate::Result;
use crate::autodiff;
use crate::comm::{Call, Communicator, ShardedTensor};
use crate::fsdp::FsdpError;
use crate::param::{ModelScan, ParamError};
use crate::placement::ShardSizes;
use crate::tensor_tree::TensorTree;

/// The ranks that compare a model.
pub(super) struct Ranks {
    /// The ranks that have distinct rows.
    data: Communicator,
    /// All ranks of the model's meshes.
    all: Communicator,
    /// The parameters whose gradients are compared, in burn's order.
    pub(super) params: Vec<ComparedParam>,
    /// Machine epsilon of the coarsest dtype that takes part.
    pub(super) epsilon: f64,
}

/// A parameter whose gradient is compared.
pub(super) struct ComparedParam {
    pub(super) path: String,
    /// Label of its unit.
    pub(super) unit: Arc<str>,
    /// The sharded dimension, and this rank's range of it.
    shard: Option<(usize, Range<usize>)>,
}

impl Ranks {
    /// Returns the ranks of a sharded model.
    ///
    /// Local: no communication.
    ///
    /// # Errors
    /// [`ParamError::NotSharded`], [`ParamError::Replaced`] and [`FsdpError::NotComparable`].
    pub(super) fn of<M: Module>(model: &M) -> Result<Self> {
        let scan = ModelScan::of(model);
        scan.check_not_replaced()?;
        let mut data: Option<Communicator> = None;
        let mut params = Vec::new();
        let mut epsilon: f64 = 0.0;
        let distributed = || {
            scan.params
                .iter()
                .filter_map(|found| Some((found, found.distributed.as_ref()?)))
        };
        for (found, param) in distributed() {
            let Some(groups) = &param.unit.spec().data else {
                continue;
            };
            let info = param.info();
            if info
                .parallel
                .as_ref()
                .is_some_and(|parallel| !parallel.data_dims.is_empty())
            {
                let problem = "ranks with distinct data hold different parts of it, as of experts";
                return Err(FsdpError::NotComparable {
                    param: found.path(),
                    problem: problem.into(),
                }
                .into());
            }
            let first = data.get_or_insert_with(|| groups.all.clone());
            if first.group() != groups.all.group() {
                let problem = format!(
                    "it is data-parallel over {}, and a parameter before it over {}",
                    groups.all.group(),
                    first.group()
                );
                return Err(FsdpError::NotComparable {
                    param: found.path(),
                    problem,
                }
                .into());
            }
            let shard = groups.shard.group();
            let range = |sizes: &ShardSizes| sizes.range(shard.size(), shard.rank());
            params.push(ComparedParam {
                path: found.path(),
                unit: param.unit.label(),
                shard: info.sharding().map(|(dim, sizes)| (dim, range(&sizes))),
            });
            let dtypes = [
                Some(found.dtype),
                info.compute,
                groups.precision.outputs,
                groups.precision.reduce,
            ];
            epsilon = dtypes
                .into_iter()
                .flatten()
                .map(machine_epsilon)
                .fold(epsilon, f64::max);
        }
        let data = data.ok_or(ParamError::NotSharded)?;
        let meshes = || distributed().map(|(found, param)| (found, param.info().spec.mesh()));
        let (_, mesh) = meshes()
            .max_by_key(|(_, mesh)| mesh.size())
            .ok_or(ParamError::NotSharded)?;
        if let Some((found, other)) = meshes()
            .find(|(_, other)| !other.ranks().iter().all(|rank| mesh.ranks().contains(rank)))
        {
            let problem = format!("it is on {other}, which is not a part of {mesh}");
            return Err(FsdpError::NotComparable {
                param: found.path(),
                problem,
            }
            .into());
        }
        let all = mesh.all()?;
        Ok(Self {
            data,
            all,
            params,
            epsilon,
        })
    }

    /// Returns the number of ranks that have distinct rows.
    pub(super) fn count(&self) -> usize {
        self.data.group().size()
    }

    /// Returns the position of this rank among those that have distinct rows.
    pub(super) fn position(&self) -> usize {
        self.data.group().rank()
    }

    /// Returns a number that is equal on ranks that differ only in their rows.
    pub(super) fn slice(&self) -> usize {
        self.data.group().ranks()[0]
    }

    /// Returns the ranges of the sharded parameters that this rank holds.
    pub(super) fn shards(&self) -> ShardRanges<'_> {
        self.params
            .iter()
            .filter_map(|param| Some((&*param.path, param.shard.clone()?)))
            .collect()
    }

    /// Gathers a value from all ranks.
    ///
    /// # Collective
    /// Every rank.
    pub(super) fn gather<T: Serialize + DeserializeOwned>(
        &self,
        label: &'static str,
        value: &T,
    ) -> Result<Vec<T>> {
        self.all.all_gather_object(Call::new(label), value)
    }

    /// Returns the global rank of the rank whose value is at `place` of [`gather`](Self::gather)'s
    /// result.
    pub(super) fn rank_at(&self, place: usize) -> usize {
        self.all.group().ranks()[place]
    }

    /// Returns the result of a comparison that ends with `difference`.
    pub(super) fn ended_by(&self, difference: Finding) -> Comparison {
        let tolerance = self.epsilon.sqrt();
        Comparison {
            units: 0,
            parameters: 0,
            largest: 0.0,
            tolerance,
            findings: vec![difference],
        }
    }

    /// Returns the run of this rank, or the first panic, if any rank panicked.
    ///
    /// # Collective
    /// Every rank.
    ///
    /// # Errors
    /// [`FsdpError::Differs`] if this rank alone panicked, and [`Error::Comm`](crate::Error::Comm)
    /// if another one did: these ranks are in different collectives then.
    pub(super) fn all_passed(
        &self,
        side: Side,
        own: Result<Run, Panicked>,
    ) -> Result<Result<Run, Finding>> {
        let difference = |rank, Panicked { unit, message }| Finding::Panic {
            unit,
            side,
            rank,
            message,
        };
        let panics = match (
            self.gather("compare, panics", &own.as_ref().err().cloned()),
            &own,
        ) {
            (Ok(panics), _) => panics,
            (Err(_), Err(panic)) => {
                let rank = self.all.group().ranks()[self.all.group().rank()];
                return Err(FsdpError::Differs(Box::new(
                    self.ended_by(difference(rank, panic.clone())),
                ))
                .into());
            }
            (Err(error), Ok(_)) => return Err(error),
        };
        let first = panics
            .into_iter()
            .enumerate()
            .find_map(|(place, panic)| Some((place, panic?)));
        match (first, own) {
            (None, Ok(run)) => Ok(Ok(run)),
            (Some((place, panic)), _) => Ok(Err(difference(self.rank_at(place), panic))),
            (None, Err(_)) => unreachable!("this rank's panic was gathered, too"),
        }
    }

    /// Joins the rows of all ranks that have distinct ones, in each tensor of `input`.
    ///
    /// # Collective
    /// Every rank.
    ///
    /// # Errors
    /// [`FsdpError::UnevenRows`] unless all ranks have tensors of the same shapes.
    pub(super) fn join<I: TensorTree + Clone>(&self, input: I) -> Result<I> {
        let mut shapes = Vec::new();
        input.clone().map_tensors(&mut |tensor| {
            shapes.push(tensor.shape().to_vec());
            tensor
        });
        let all: Vec<Vec<Vec<usize>>> = self.gather("compare, shapes", &shapes)?;
        if let Some(place) = all.iter().position(|shapes| *shapes != all[0]) {
            let [first, other] = [0, place].map(|place| all[place].clone());
            let [first_rank, other_rank] = [0, place].map(|place| self.rank_at(place));
            return Err(FsdpError::UnevenRows {
                first_rank,
                first,
                other_rank,
                other,
            }
            .into());
        }
        let mut failed = None;
        let joined = input.map_tensors(&mut |tensor| match failed {
            None => self.joined(&tensor).unwrap_or_else(|error| {
                failed = Some(error);
                tensor
            }),
            Some(_) => tensor,
        });
        failed.map_or(Ok(joined), Err)
    }

    fn joined(&self, tensor: &DispatchTensor) -> Result<DispatchTensor> {
        let is_float = tensor.dtype().is_float();
        let own = match is_float {
            true => autodiff::plain(tensor.clone()),
            false => DispatchTensor {
                autodiff: DispatchAutodiffContext::Disabled,
                ..tensor.clone()
            },
        };
        let sizes = ShardSizes::Chunked(own.shape()[0] * self.count());
        let rows = vec![ShardedTensor {
            tensor: own,
            dim: 0,
            sizes,
        }];
        let joined = self
            .data
            .all_gather(Call::new("compare, rows"), rows)
            .wait()?
            .remove(0);
        Ok(match is_float {
            true => autodiff::constant(joined, tensor),
            false => DispatchTensor {
                autodiff: tensor.autodiff,
                ..joined
            },
        })
    }
}

/// Returns the distance from 1 to the next larger number of a float type; 0 for other types.
pub(super) fn machine_epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 | DType::Flex32 => f32::EPSILON.into(),
        DType::F16 => half::f16::EPSILON.into(),
        DType::BF16 => half::bf16::EPSILON.into(),
        _ => 0.0,
    }
}
