//! Weights in the formats of other frameworks: loaded on one rank before a model is distributed,
//! and written from a distributed model. Feature `store`.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn_dtensor::prelude::*;
//! use burn_dtensor::pretrained;
//!
//! # let file = std::env::temp_dir().join(format!("pretrained-{}.safetensors", std::process::id()));
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
//!     let model = fully_shard(LinearConfig::new(4, 6).init(world.device()), &mesh, FullyShard::new())?;
//!     // Written by the first rank. PyTorch reads a `weight` of [6, 4] and a `bias`.
//!     pretrained::save_into(&model, &mesh, &mut pretrained::pytorch_safetensors(&file))?;
//!
//!     let again = LinearConfig::new(4, 6).init(world.device());
//!     // Read by the first rank. The parameters of the other ranks stay lazy.
//!     let (again, report) = pretrained::load_from(again, &mesh, &mut pretrained::pytorch_safetensors(&file))?;
//!     assert_eq!(report.applied, ["weight", "bias"]);
//!     let again = fully_shard(again, &mesh, FullyShard::new())?;
//!     assert_eq!(again.weight.val().into_data(), model.weight.val().into_data());
//!     Ok(())
//! })?;
//! # std::fs::remove_file(file)?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! burn's [stores](burn::store::ModuleStore) read and write the files: `PytorchStore` reads what
//! `torch.save` writes, `SafetensorsStore` reads and writes safetensors, `BurnpackStore` burn's own
//! format. Their options select and rename tensors. The functions of this module add the ranks:
//!
//! ```text
//!                load_from                                  fully_shard
//!   first rank   read file │ send report, int and bool     │ send shards, one parameter after another
//!   other ranks            │ receive;  floats stay lazy    │ receive shards
//! ```

use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::path::PathBuf;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::store::{BurnToPyTorchAdapter, ModuleStore, PyTorchToBurnAdapter, SafetensorsStore};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use itertools::Itertools;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::burn_compat::{ModulePath, TensorMapper, TensorVisitor, map_tensors, visit_tensors};
use crate::comm::agree_on_first;
use crate::mesh::DeviceMesh;
use crate::param::{full_model_if, walk_with_paths};

/// Reason why weights were not loaded or written.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum PretrainedError {
    /// The first rank could not read the weights, or they do not fit the model.
    #[error(
        "rank {rank} could not load the weights: {reason}. Correct the store on that rank: its path, its filter and \
         `with_key_remapping`, and the conversion of PyTorch's names and layouts, which `PytorchStore` and the store of \
         `pretrained::pytorch_safetensors` make"
    )]
    Load {
        /// Global rank that read the weights.
        rank: usize,
        /// Message of the store, which names the tensors.
        reason: String,
    },
    /// The first rank could not write the model.
    #[error(
        "rank {rank} could not write the model: {reason}. Correct the store on that rank, for instance create the folder"
    )]
    Save {
        /// Global rank that wrote the model.
        rank: usize,
        /// Message of the store.
        reason: String,
    },
    /// The model is distributed, so a rank's parameters are shards.
    #[error(
        "parameter `{param}` is distributed, and a file has full parameters. Load the weights before `parallelize` and \
         `fully_shard`"
    )]
    Distributed {
        /// Path of the first distributed parameter.
        param: String,
    },
}

/// Report of [`load_from`], identical on every rank. Paths are those of the model, except for
/// `unused`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// Parameters and buffers that have values of the file.
    pub applied: Vec<String>,
    /// Those that the store's filter left out.
    pub skipped: Vec<String>,
    /// Those that the file does not contain. Empty unless the store allows partial loading.
    pub missing: Vec<String>,
    /// Tensors of the file, under the names that the store's remapping gives them, that the model
    /// does not have.
    pub unused: Vec<String>,
}

/// Loads the weights of a model on the first rank of `mesh`, before the model is distributed.
/// Returns the model, and a report.
///
/// Parameters that the other ranks have not initialized stay lazy and take no memory.
/// [`parallelize`](crate::parallel::parallelize) and [`fully_shard`](crate::fsdp::fully_shard) then
/// send every rank its shards of the first rank's values. The full model is in the memory of one
/// rank only.
///
/// Each float parameter keeps the model's dtype, as in PyTorch's `load_state_dict`: values of
/// another dtype are cast. A lazy parameter has the default dtype of its device. Integer and
/// boolean parameters, which are never sharded, are set on every rank. A parameter that
/// `fully_shard` [ignores](crate::fsdp::FullyShard::with_ignored) has the file's values on the
/// first rank only.
///
/// # Collective
/// Every rank of `mesh`, with an identical model. Pass the mesh of which `parallelize` and
/// `fully_shard` get slices. If the slices are not combined afterwards, as when only `parallelize`
/// is called, pass the slice: its first rank reads. The other ranks do not use `store`. They wait
/// for at most the launch's deadline.
///
/// # Errors
/// On every rank: [`PretrainedError::Load`] if the first rank cannot read the file, if a tensor is
/// missing, unless the store allows partial loading, or if a shape does not fit.
/// [`PretrainedError::Distributed`] if the model is distributed;
/// [`Error::Comm`](crate::Error::Comm) if another rank fails. Tensors of the file that the model
/// does not have are no error: see [`LoadReport::unused`].
pub fn load_from<M: Module, S: ModuleStore>(
    model: M,
    mesh: &DeviceMesh,
    store: &mut S,
) -> Result<(M, LoadReport)> {
    if let Some(param) = walk_with_paths(&model)
        .distributed
        .into_iter()
        .find_map(|visited| visited.path)
    {
        return Err(PretrainedError::Distributed { param }.into());
    }
    let group = mesh.world().group(mesh.ranks())?;
    // The first rank takes the model and puts back what it has read.
    let mut model = Some(model);
    let loaded = agree_on_first(&group, "pretrained::load_from", || {
        let own = model.take().expect("the step runs once");
        let (own, loaded) = read(own, store).map_err(|reason| PretrainedError::Load {
            rank: mesh.ranks()[0],
            reason,
        })?;
        model = Some(own);
        Ok::<_, PretrainedError>(loaded)
    })?;
    let mut model = model.expect("without an error the model is back");
    let Loaded { report, discrete } = loaded;
    if group.group().rank() != 0 {
        model = model.map(&mut WriteDiscrete {
            values: discrete.into(),
        });
    }
    Ok((model, report))
}

/// Writes the full model from the first rank of `mesh`.
///
/// The parameters are gathered unit by unit, as by [`full_model_on`](crate::fsdp::full_model_on):
/// the first rank holds the full model and the others at most one unit.
///
/// # Collective
/// Every rank of `mesh`, which contains the meshes over which the model is distributed. The other
/// ranks do not use `store`. They wait for at most the launch's deadline.
///
/// # Errors
/// [`PretrainedError::Save`] on every rank if the first rank cannot write; [`ParamError::Replaced`]
/// as in [`full_model`](crate::fsdp::full_model); [`Error::Comm`](crate::Error::Comm) if another
/// rank fails.
///
/// [`ParamError::Replaced`]: crate::fsdp::ParamError::Replaced
pub fn save_into<M: Module, S: ModuleStore>(
    model: &M,
    mesh: &DeviceMesh,
    store: &mut S,
) -> Result<()> {
    let group = mesh.world().group(mesh.ranks())?;
    let full = full_model_if(model, group.group().rank() == 0)?;
    agree_on_first(&group, "pretrained::save_into", || {
        let full = full.expect("the first rank has the full model");
        let written = store.collect_from(&full);
        written.map_err(|error| PretrainedError::Save {
            rank: mesh.ranks()[0],
            reason: reason(error),
        })
    })
}

/// Returns a store for a safetensors file with PyTorch's names and layouts, to be read or written.
/// Local.
///
/// The weight of a `Linear` is `[out, in]` there and `[in, out]` in burn. `gamma` and `beta` of
/// burn's norms are `weight` and `bias`. Paths have no enum variants. Files are replaced only once
/// they are complete, and have the metadata `format: pt`, which Hugging Face's transformers
/// require. For other names, add [`with_key_remapping`](SafetensorsStore::with_key_remapping): it
/// renames the file's tensors on loading, and the model's on writing.
pub fn pytorch_safetensors(path: impl Into<PathBuf>) -> SafetensorsStore {
    SafetensorsStore::from_file(path)
        .with_from_adapter(PyTorchToBurnAdapter)
        .with_to_adapter(BurnToPyTorchAdapter)
        .skip_enum_variants(true)
        .overwrite(true)
        .metadata("format", "pt")
}

/// Result of loading on the first rank.
#[derive(Serialize, Deserialize)]
struct Loaded {
    report: LoadReport,
    /// The values of integer and boolean parameters, in burn's order.
    discrete: Vec<TensorData>,
}

/// Loads the model on this rank.
///
/// # Errors
/// The store's message.
fn read<M: Module, S: ModuleStore>(mut model: M, store: &mut S) -> Result<(M, Loaded), String> {
    let mut dtypes = FloatDTypes::default();
    visit_tensors(&model, &mut dtypes);
    let result = store.apply_to(&mut model).map_err(reason)?;
    // A store that does not validate would leave a parameter of another shape at its random values.
    if !result.errors.is_empty() {
        return Err(result.errors.iter().join("; "));
    }
    let model = map_tensors(model, &mut dtypes);
    let mut discrete = ReadDiscrete::default();
    model.visit(&mut discrete);
    let missing = result.missing.into_iter().map(|(path, _)| path).collect();
    let report = LoadReport {
        applied: result.applied,
        skipped: result.skipped,
        missing,
        unused: result.unused,
    };
    Ok((
        model,
        Loaded {
            report,
            discrete: discrete.values,
        },
    ))
}

/// Returns the message of a store's error, to be followed by a period.
fn reason(error: impl Display) -> String {
    error.to_string().trim_end_matches('.').into()
}

/// The dtypes of float parameters and buffers by path, recorded on a visit and restored by mapping.
#[derive(Default)]
struct FloatDTypes(HashMap<String, DType>);

impl TensorVisitor for FloatDTypes {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let dtype = match param.is_initialized() {
            true => param.base().dtype(),
            false => param.lazy_device().settings().float_dtype.into(),
        };
        self.0.insert(path.join(), dtype);
    }
}

impl TensorMapper for FloatDTypes {
    fn float<const D: usize>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let dtype = self.0.get(&path.join());
        let Some(&dtype) = dtype.filter(|dtype| {
            dtype.is_float() && param.is_initialized() && param.base().dtype() != **dtype
        }) else {
            return param;
        };
        let require_grad = param.is_require_grad();
        param.map(|value| value.cast(dtype).detach().set_require_grad(require_grad))
    }
}

/// The values of integer and boolean parameters, in burn's order.
#[derive(Default)]
struct ReadDiscrete {
    values: Vec<TensorData>,
}

impl ModuleVisitor for ReadDiscrete {
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.values
            .push(param.transform_for_save().val().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.values
            .push(param.transform_for_save().val().into_data());
    }
}

/// Sets integer and boolean parameters to `values`, in burn's order.
struct WriteDiscrete {
    values: VecDeque<TensorData>,
}

impl WriteDiscrete {
    fn next(&mut self) -> TensorData {
        self.values
            .pop_front()
            .expect("the models of all ranks have the same parameters")
    }
}

impl ModuleMapper for WriteDiscrete {
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let id = param.id;
        let value = self.next();
        let value = Tensor::from_data(value.clone(), (&param.lazy_device(), value.dtype()));
        param.transform_for_load(value, id)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let id = param.id;
        let value = self.next();
        let value = Tensor::from_data(value.clone(), (&param.lazy_device(), value.dtype()));
        param.transform_for_load(value, id)
    }
}
