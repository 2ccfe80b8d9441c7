//! [`visit_tensors`] and [`map_tensors`]: visitors and mappers that know the path of each tensor.
//!
//! # What it relies on
//! * burn calls `enter_module` and `exit_module` around every field, with the field's name and, as
//!   text, the kind and name of the type that declares it: `Struct:Linear`.
//! * A parameter's reparameterization is visited after the parameter's stored tensor, inside a
//!   field whose declaring type is called `Reparameterization`. The visitor gets the parameters
//!   inside it, but never the reparameterization itself.
//!
//! # The issue to file
//! *Visitors should be able to tell types apart, and see reparameterizations.*
//! `ModuleVisitor::enter_module` gets the name of the declaring type as a string, so a visitor
//! cannot tell a type of burn from another type of that name. A method `visit_reparameterization<R:
//! Reparameterization>(&mut self, &R)`, and a `TypeId` next to the name (both with a default that
//! does nothing), would be enough.
//!
//! # Another issue to file
//! *Visitors should be able to skip a module.* `enter_module` returns nothing, and the visitor does
//! not see the module itself, so a visit always reaches all parameters. A library that needs the
//! parameters of a model's parts, one after the other, visits those of the last part once for each
//! module around it. If `enter_module` could return that the field is to be skipped, and passed the
//! field's address (`*const ()`) together with its `TypeId`, which tells a newtype from its only
//! field, the visit of an outer module could serve the modules inside it as long as it is borrowed.

use std::panic::Location;

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, Parameter};
use burn::tensor::{Bool, Int, Tensor};

use super::layers::{self, BurnLayer};
use crate::dtensor::Kind;

/// Name that burn passes to visitors and mappers for the type that declares a reparameterization.
pub(crate) const REPARAMETERIZATION: &str = "Reparameterization";

/// Path of the field that is being visited.
#[derive(Debug, Clone, Default)]
pub(crate) struct ModulePath {
    names: Vec<String>,
    containers: Vec<Container>,
}

/// A type that declares a field of a module.
#[derive(Debug, Clone)]
pub(crate) struct Container {
    text: String,
    declared_at: &'static Location<'static>,
}

impl ModulePath {
    fn enter(&mut self, name: &str, container: &str, declared_at: &'static Location<'static>) {
        self.names.push(name.into());
        self.containers.push(Container {
            text: container.into(),
            declared_at,
        });
    }

    fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }

    /// Returns the components, outermost first.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the type that declares each component, outermost first.
    pub(crate) fn containers(&self) -> &[Container] {
        &self.containers
    }

    /// Returns the last component, and the type that declares it.
    pub(crate) fn last(&self) -> Option<(&str, &Container)> {
        Some((self.names.last()?, self.containers.last()?))
    }

    /// Returns the components, separated by dots.
    pub(crate) fn join(&self) -> String {
        self.names.join(".")
    }
}

impl Container {
    /// Returns the text with which burn describes it.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns its name if it is a struct.
    pub(crate) fn struct_name(&self) -> Option<&str> {
        self.text.strip_prefix("Struct:")
    }

    /// Returns the layer of burn-nn that it is, if any. A type of the same name that is not burn's
    /// is none.
    pub(crate) fn layer(&self) -> Option<BurnLayer> {
        BurnLayer::of(self.struct_name()?, self.declared_at)
    }

    /// Returns true if it is the struct of this name that this crate defines.
    pub(crate) fn is_own(&self, name: &str) -> bool {
        self.struct_name() == Some(name) && layers::is_of_this_crate(self.declared_at)
    }
}

/// Visitor of the tensors and flags of a module.
#[allow(unused_variables, reason = "the default methods do nothing")]
pub(crate) trait TensorVisitor {
    /// Called when a field is entered. It is the last component of `path`.
    fn enter(&mut self, path: &ModulePath) {}

    /// Called when a field is left. It is the last component of `path`.
    fn exit(&mut self, path: &ModulePath) {}

    /// Visits a tensor of any kind, but a float tensor only if `float` is not implemented.
    fn tensor<const D: usize, K: Kind>(&mut self, path: &ModulePath, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
    }

    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        self.tensor(path, param);
    }

    fn flag(&mut self, path: &ModulePath, flag: &Param<Flag>) {}
}

/// Mapper of the tensors and flags of a module.
#[allow(unused_variables, reason = "the default methods change nothing")]
pub(crate) trait TensorMapper {
    /// Called when a field is left. It is the last component of `path`.
    fn exit(&mut self, path: &ModulePath) {}

    /// Maps a tensor of any kind, but a float tensor only if `float` is not implemented.
    fn tensor<const D: usize, K: Kind>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        param
    }

    fn float<const D: usize>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        self.tensor(path, param)
    }

    fn flag(&mut self, path: &ModulePath, flag: Param<Flag>) -> Param<Flag> {
        flag
    }
}

/// Shows all tensors of `module` to `visitor`, in burn's order.
pub(crate) fn visit_tensors<M: Module>(module: &M, visitor: &mut impl TensorVisitor) {
    module.visit(&mut WithPath {
        path: ModulePath::default(),
        inner: visitor,
    });
}

/// Returns `module` with all tensors mapped by `mapper`, in burn's order.
pub(crate) fn map_tensors<M: Module>(module: M, mapper: &mut impl TensorMapper) -> M {
    module.map(&mut WithPath {
        path: ModulePath::default(),
        inner: mapper,
    })
}

/// A visitor or mapper with the present path.
struct WithPath<'a, V> {
    path: ModulePath,
    inner: &'a mut V,
}

impl<V: TensorVisitor> ModuleVisitor for WithPath<'_, V> {
    #[track_caller] // the place where burn's macro declares the type
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container, Location::caller());
        self.inner.enter(&self.path);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.inner.exit(&self.path);
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.inner.float(&self.path, param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.inner.tensor(&self.path, param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.inner.tensor(&self.path, param);
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.inner.flag(&self.path, flag);
    }
}

impl<V: TensorMapper> ModuleMapper for WithPath<'_, V> {
    #[track_caller]
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container, Location::caller());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.inner.exit(&self.path);
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.inner.float(&self.path, param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.inner.tensor(&self.path, param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.inner.tensor(&self.path, param)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.inner.flag(&self.path, flag)
    }
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use burn::module::Lora;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    #[derive(Default)]
    struct Calls(Vec<String>);

    impl TensorVisitor for Calls {
        fn enter(&mut self, path: &ModulePath) {
            let (name, container) = path.last().expect("entered");
            self.0.push(format!("enter {name} of {}", container.text()));
        }

        fn tensor<const D: usize, K: Kind>(&mut self, path: &ModulePath, _: &Param<Tensor<D, K>>)
        where
            Tensor<D, K>: Parameter,
        {
            self.0.push(format!("{} of {D} dimensions", path.join()));
        }
    }

    #[test]
    fn burn_visits_fields_with_the_names_of_their_types_and_a_reparameterization_after_its_parameter()
     {
        let linear: Linear = LinearConfig::new(2, 3)
            .with_bias(false)
            .init(&Device::flex());
        let mut calls = Calls::default();
        visit_tensors(&vec![linear.apply_lora(Lora::new(1, 2.0))], &mut calls);
        let expected = [
            "enter 0 of Vec",
            "enter weight of Struct:Linear",
            "0.weight of 2 dimensions",
            "enter lora of Reparameterization",
            "enter a of Struct:LoraAdapter",
            "0.weight.lora.a of 2 dimensions",
            "enter b of Struct:LoraAdapter",
            "0.weight.lora.b of 2 dimensions",
            "enter bias of Struct:Linear",
        ];
        assert_eq!(calls.0, expected);
    }
}
