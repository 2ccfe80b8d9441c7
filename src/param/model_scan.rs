//! [`ModelScan`]: a list of all parameters and buffers of a model, made before any parameter is distributed.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;

use burn::module::{Flag, Module, Param, ParamId, Parameter, Reparameterization};
use burn::tensor::{DType, Device, Tensor};
use itertools::Itertools;

use super::ParamError;
use super::distributed::copying;
use super::distributed::{DistributedParameter, take_visited};
use super::shards::ShardMarker;
use super::unit_name::UnitName;
use crate::burn_compat::{
    ADAPTER, BurnLayer, Container, MARK, ModulePath, REPARAMETERIZATION, TensorVisitor, marked,
    undrawn, visit_tensors,
};
use crate::dtensor::Kind;
use crate::mesh::DeviceMesh;
use crate::pattern::PathPattern;
use crate::{autodiff, memory};

/// Float parameters and buffers of a model, in burn's order.
#[derive(Default)]
pub(crate) struct ModelScan {
    /// Tensor visited last. It is a parameter if a reparameterization follows, and a buffer
    /// otherwise.
    last: Option<ScannedParam>,
    pub(crate) params: Vec<ScannedParam>,
    pub(crate) buffers: Vec<Buffer>,
    /// Batch norms and dropouts that are not frozen.
    pub(crate) layers: Vec<Layer>,
    /// Paths of the parameters that have an unsupported reparameterization, with its name.
    pub(super) foreign: Vec<(Vec<String>, String)>,
}

/// A tensor of a model that is not a float parameter.
pub(crate) struct Buffer {
    pub(crate) path: Vec<String>,
    /// True for a `RunningState`, which forward writes in place and which clones share; false for
    /// an int or bool parameter.
    pub(crate) running: bool,
}

/// A layer of a type that is noted.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) path: String,
    pub(crate) kind: BurnLayer,
}

/// Types of burn whose layers are noted.
const NOTED: [BurnLayer; 2] = [BurnLayer::BatchNorm, BurnLayer::Dropout];

/// A float parameter.
pub(crate) struct ScannedParam {
    pub(crate) id: ParamId,
    pub(crate) path: Vec<String>,
    /// The type that declares each component of `path`.
    containers: Vec<Container>,
    /// Shape of the stored value.
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(super) device: Device,
    /// True if the values have not been drawn.
    pub(crate) lazy: bool,
    /// The distributed parameter that an earlier call made of it.
    pub(crate) distributed: Option<DistributedParameter>,
    /// True if it has an adapter (LoRA).
    pub(crate) adapted: bool,
}

impl ModelScan {
    /// Lists the parameters and buffers of `model`.
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut scan = Self::default();
        take_visited();
        visit_tensors(&copying(|| marked(model)), &mut scan);
        scan.replace_last(None);
        // A parallelized batch norm computes with DTensors.
        let Self { layers, params, .. } = &mut scan;
        layers.retain(|layer| {
            let of_layer = params
                .iter()
                .filter(|param| param.ancestor(1) == layer.path);
            let mut distributed = of_layer.filter_map(|param| param.distributed.as_ref());
            distributed.all(|param| param.info().parallel.is_none())
        });
        scan
    }

    /// Returns true if the model has a `RunningState`.
    pub(crate) fn has_running(&self) -> bool {
        self.buffers.iter().any(|buffer| buffer.running)
    }

    /// Replaces the tensor visited last by `next`. The previous one is recorded as a buffer,
    /// because no reparameterization followed it.
    fn replace_last(&mut self, next: Option<ScannedParam>) {
        let before = std::mem::replace(&mut self.last, next);
        self.buffers
            .extend(before.map(|ScannedParam { path, .. }| Buffer {
                path,
                running: true,
            }));
    }

    /// Returns the paths of the modules that contain parameters, outermost first.
    pub(crate) fn modules(&self) -> Vec<String> {
        self.params
            .iter()
            .flat_map(|found| found.modules().collect_vec().into_iter().rev())
            .unique()
            .collect()
    }

    /// Checks that all parameters except those `ignored` can be distributed.
    ///
    /// # Errors
    /// [`ParamError::Tied`] for two clones of the same parameter, unless both are ignored;
    /// [`ParamError::Reparameterized`].
    pub(crate) fn check(&self, ignored: impl Fn(&str) -> bool) -> Result<(), ParamError> {
        let mut first = HashMap::new();
        let pairs = self.params.iter().filter_map(|found| {
            let other = first.insert(found.id, found)?;
            Some((other.path(), found.path()))
        });
        if let Some((param, other)) = pairs
            .into_iter()
            .find(|(one, other)| !(ignored(one) && ignored(other)))
        {
            return Err(ParamError::Tied { param, other });
        }
        let mut foreign = self
            .foreign
            .iter()
            .map(|(path, name)| (path.join("."), name.clone()));
        match foreign.find(|(path, _)| !ignored(path)) {
            Some((param, name)) => Err(ParamError::Reparameterized { param, name }),
            None => Ok(()),
        }
    }

    /// Checks that no parameter has an adapter.
    ///
    /// # Errors
    /// [`ParamError::Reparameterized`].
    pub(crate) fn check_not_adapted(&self) -> Result<(), ParamError> {
        match self.params.iter().find(|found| found.adapted) {
            Some(found) => Err(found.reparameterized()),
            None => Ok(()),
        }
    }

    /// Checks that adapters can be distributed with their parameters, except those of `ignored`
    /// parameters. Returns the paths of all parameters with burn's adapters, or nothing if all of
    /// these are ignored.
    ///
    /// # Errors
    /// [`ParamError::Reparameterized`] for an adapter of a quantized parameter;
    /// [`ParamError::AdapterConflict`] if any parameter has a reparameterization other than burn's
    /// adapters.
    pub(crate) fn adapted(
        &self,
        ignored: impl Fn(&str) -> bool,
    ) -> Result<HashSet<String>, ParamError> {
        // A distributed parameter already contains its adapter.
        let burns = self
            .params
            .iter()
            .filter(|found| found.adapted && found.distributed.is_none())
            .collect_vec();
        let Some(first) = burns.iter().find(|found| !ignored(&found.path())) else {
            return Ok(HashSet::new());
        };
        if let Some(quantized) = burns
            .iter()
            .find(|found| !found.dtype.is_float() && !ignored(&found.path()))
        {
            return Err(quantized.reparameterized());
        }
        let mut distributed = self
            .params
            .iter()
            .filter(|found| found.distributed.is_some());
        let other = self
            .foreign
            .first()
            .map(|(path, name)| (path.join("."), name.clone()));
        let other = other.or_else(|| {
            Some((
                distributed.next()?.path(),
                DistributedParameter::NAME.into(),
            ))
        });
        match other {
            Some((other, name)) => Err(ParamError::AdapterConflict {
                param: first.path(),
                other,
                name,
            }),
            None => Ok(burns.iter().map(|found| found.path()).collect()),
        }
    }

    /// Returns the paths of all parameters, including those that cannot be distributed.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.foreign
            .iter()
            .map(|(path, _)| path.join("."))
            .chain(self.params.iter().map(ScannedParam::path))
            .collect()
    }
}

impl ScannedParam {
    fn reparameterized(&self) -> ParamError {
        ParamError::Reparameterized {
            param: self.path(),
            name: ADAPTER.into(),
        }
    }

    pub(crate) fn path(&self) -> String {
        self.path.join(".")
    }

    /// Returns the global shape of the parameter, of which only a shard may be stored.
    pub(crate) fn global_shape(&self) -> Vec<usize> {
        self.distributed
            .as_ref()
            .map_or_else(|| self.shape.clone(), |param| param.info().shape().to_vec())
    }

    /// Returns the path of the ancestor `above` levels up: 0 is the parameter itself, 1 its layer.
    pub(crate) fn ancestor(&self, above: usize) -> String {
        self.path[..self.path.len() - above].join(".")
    }

    /// Returns the paths of the modules that contain it, innermost first, without the model itself.
    fn modules(&self) -> impl Iterator<Item = String> + '_ {
        (1..self.path.len()).map(|above| self.ancestor(above))
    }

    /// Returns the type of a module that contains the parameter: with `above` = 0 its layer, with 1
    /// the module that contains the layer.
    pub(crate) fn container(&self, above: usize) -> Option<&Container> {
        self.containers.iter().nth_back(above)
    }

    /// Returns the path of its unit's module if it is distributed as `param`. Returns `None` if
    /// that module is outside the scanned model.
    pub(crate) fn module(&self, param: &DistributedParameter) -> Option<String> {
        let module = self.path.len().checked_sub(param.info().depth)?;
        Some(self.path[..module].join("."))
    }

    /// Returns the unit of the innermost module around the parameter that is in one, and the number
    /// of path components from that module down to the parameter. The default is the unit of the
    /// model itself.
    pub(crate) fn unit(&self, unit_of: impl Fn(&str) -> Option<UnitName>) -> (UnitName, usize) {
        let taken = self
            .modules()
            .find_map(|module| Some((unit_of(&module)?, module)));
        let (unit, module) = taken.unwrap_or_else(|| (UnitName::of(""), String::new()));
        let depth = self.path.len() - module.split('.').filter(|part| !part.is_empty()).count();
        (unit, depth)
    }
}

/// Checks that every pattern matches one of `present_paths`. `what` names the kind of these items.
///
/// # Errors
/// [`ParamError::NoMatch`].
pub(crate) fn check_patterns<'a>(
    patterns: impl IntoIterator<Item = &'a PathPattern>,
    what: &'static str,
    present_paths: &[String],
) -> Result<(), ParamError> {
    let mut patterns = patterns.into_iter();
    let Some(pattern) =
        patterns.find(|pattern| !present_paths.iter().any(|path| pattern.matches(path)))
    else {
        return Ok(());
    };
    let list = present_paths
        .iter()
        .map(|path| format!("`{path}`"))
        .join(", ");
    let present = if list.is_empty() { "none".into() } else { list };
    let near_path = pattern.nearest(present_paths).cloned();
    Err(ParamError::NoMatch {
        pattern: pattern.text().into(),
        what,
        near_path,
        present,
    })
}

impl TensorVisitor for ModelScan {
    fn enter(&mut self, path: &ModulePath) {
        let Some((name, container)) = path.last() else {
            return;
        };
        if container.text() != REPARAMETERIZATION {
            return;
        }
        match (self.last.take(), name) {
            (Some(param), MARK | DistributedParameter::NAME) => self.params.push(param),
            (Some(param), ADAPTER) => self.params.push(ScannedParam {
                adapted: true,
                ..param
            }),
            (Some(param), _) => self.foreign.push((param.path, name.into())),
            // The adapter of a distributed parameter follows its `DistributedParameter`.
            (None, ADAPTER) => self
                .params
                .iter_mut()
                .last()
                .into_iter()
                .for_each(|param| param.adapted = true),
            (None, _) => {}
        }
    }

    fn exit(&mut self, path: &ModulePath) {
        let Some((name, container)) = path.last() else {
            return;
        };
        if (name, container.text()) == (DistributedParameter::NAME, REPARAMETERIZATION)
            && let (Some(param), Some(visited)) = (self.params.last_mut(), take_visited())
        {
            param.distributed = Some(visited);
        }
    }

    fn float<const D: usize>(&mut self, at: &ModulePath, param: &Param<Tensor<D>>) {
        let value = match param.is_initialized() {
            true => param.base(),
            // Reading the base of a lazy parameter would draw its values.
            false => undrawn(param.clone()).base(),
        };
        self.replace_last(Some(ScannedParam {
            id: param.id,
            path: at.names().into(),
            containers: at.containers().into(),
            shape: value.shape().to_vec(),
            dtype: value.dtype(),
            device: value.device(),
            lazy: !param.is_initialized(),
            distributed: None,
            adapted: false,
        }));
    }

    /// Records an int or bool parameter as a buffer, unless it is a [`ShardMarker`].
    fn tensor<const D: usize, K: Kind>(&mut self, at: &ModulePath, _: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        if !ShardMarker::is_at(at) {
            self.replace_last(None);
            self.buffers.push(Buffer {
                path: at.names().into(),
                running: false,
            });
        }
    }

    /// Notes the layer that the flag `training` belongs to.
    fn flag(&mut self, at: &ModulePath, flag: &Param<Flag>) {
        let layer = at.last().and_then(|(_, container)| container.layer());
        let kind = layer.filter(|kind| NOTED.contains(kind) && flag.is_enabled());
        let path = at
            .names()
            .split_last()
            .map_or(&[][..], |(_, path)| path)
            .join(".");
        self.layers.extend(kind.map(|kind| Layer { path, kind }));
    }
}

impl ModelScan {
    /// Checks that all parameters except those `ignored` are on the rank's device, and that
    /// gradients can be recorded there. A parameter that is `offloaded` already, or will be, may
    /// also be in host memory.
    ///
    /// # Errors
    /// [`ParamError::Backend`], [`ParamError::Device`].
    pub(crate) fn check_devices(
        &self,
        mesh: &DeviceMesh,
        ignored: impl Fn(&str) -> bool,
        offloaded: impl Fn(&ScannedParam) -> bool,
    ) -> Result<(), ParamError> {
        let is_in_place = |found: &&ScannedParam| {
            let may_be_on_host = found
                .distributed
                .as_ref()
                .is_some_and(|param| param.unit.spec().offloaded().is_some())
                || offloaded(found);
            may_be_on_host && memory::is_host(&found.device.clone().inner())
        };
        let params = self.params.iter().filter(|found| !is_in_place(found));
        let params = params.map(|found| (found.path(), found.device.clone().inner()));
        check_devices(
            mesh.device(),
            autodiff::is_supported,
            params.filter(|(path, _)| !ignored(path)),
        )
    }
}

/// Implements [`ModelScan::check_devices`] for any type of device.
fn check_devices<D: PartialEq + Debug>(
    own: &D,
    supported: impl Fn(&D) -> bool,
    params: impl IntoIterator<Item = (String, D)>,
) -> Result<(), ParamError> {
    let own_text = format!("{own:?}");
    if !supported(own) {
        return Err(ParamError::Backend { device: own_text });
    }
    match params.into_iter().find(|(_, device)| device != own) {
        Some((param, device)) => Err(ParamError::Device {
            param,
            device: format!("{device:?}"),
            own: own_text,
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(own: u8, params: [u8; 2]) -> Result<(), ParamError> {
        let params = ["first", "second"]
            .map(String::from)
            .into_iter()
            .zip(params);
        check_devices(&own, |&device| device < 10, params)
    }

    #[test]
    fn parameters_are_on_the_ranks_device() {
        assert!(checked(3, [3, 3]).is_ok());
        let error = checked(3, [3, 4]).unwrap_err();
        let ParamError::Device { param, device, own } = &error else {
            panic!("{error}")
        };
        assert_eq!([param.as_str(), device, own], ["second", "4", "3"]);
        assert!(error.to_string().contains("world.device()"), "{error}");
    }

    #[test]
    fn a_backend_without_custom_operations_is_told() {
        let error = checked(12, [12, 12]).unwrap_err();
        assert!(
            matches!(&error, ParamError::Backend { device } if device == "12"),
            "{error}"
        );
        assert!(
            ["flex", "cuda", "wgpu"]
                .iter()
                .all(|feature| error.to_string().contains(feature)),
            "{error}"
        );
    }

    #[cfg(feature = "flex")]
    #[test]
    fn flex_is_supported() {
        use burn::tensor::Device;
        assert!(
            autodiff::is_supported(&Device::flex())
                && autodiff::is_supported(&Device::flex().autodiff())
        );
    }
}
