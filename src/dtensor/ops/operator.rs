//! [`Operator`]: the sharding that a rule resolves to for inputs of given specs, and the cache of these decisions.
//!
//! Resolving searches over placements, and a training step repeats the same few searches. The cache
//! key is the rule, the specs of the inputs with their constraints, and the [cost
//! model](super::CostModel) in force. Specs are interned, so looking up a repeated operator hashes
//! a few pointers and allocates nothing.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::hash::{BuildHasher, Hash, Hasher};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use burn::tensor::{DType, Shape, Tensor};
use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;

use super::ShardingRule;
use super::cost_model::DecisionScope;
use super::explain;
use super::operand::{Arg, Operand, PlacementConstraint};
use super::policy::RedistributePolicy;
use super::resolve_sharding::{ResolvedSharding, resolve_sharding};
use crate::dtensor::spec::CAPACITY;
use crate::dtensor::{DTensor, DTensorError, DTensorSpec, Kind};
use crate::error::OrUnwind;
use crate::placement::Layout;
use crate::{Error, Result};

/// A rule resolved for inputs of given specs: the layout to which each input is redistributed, and
/// the layouts of the outputs.
///
/// [`apply`](super::apply) converts inputs and results by itself. An operator that does more
/// between the two, such as a collective, uses [`resolve`](Self::resolve), [`input`](Self::input)
/// and [`output`](Self::output).
#[derive(Debug)]
pub struct Operator(ResolvedSharding);

/// Local, except for [`input`](Self::input).
impl Operator {
    /// Resolves `rule` for these inputs, or returns the decision from this thread's cache.
    ///
    /// # Errors
    /// [`MeshMismatch`](crate::dtensor::DTensorError::MeshMismatch) and
    /// [`RankMismatch`](crate::dtensor::DTensorError::RankMismatch) if the inputs are on different
    /// meshes or ranks; [`Operands`](crate::dtensor::DTensorError::Operands) from the rule;
    /// [`ImplicitRedistribution`](crate::dtensor::DTensorError::ImplicitRedistribution) under
    /// [`RedistributePolicy::Deny`].
    pub fn resolve<R: ShardingRule>(rule: &R, inputs: &[Arg<'_>]) -> Result<Rc<Self>> {
        let operator = decision(rule, inputs)?;
        match &operator.0.implicit {
            Some(error) if RedistributePolicy::current() == RedistributePolicy::Deny => {
                Err((**error).clone().into())
            }
            _ => Ok(operator),
        }
    }

    /// Returns the local tensor of `operand` as the local operator expects input `at`, after
    /// redistribution.
    ///
    /// # Collective
    /// If the input is redistributed: every rank of the mesh. In backward also if it varies.
    ///
    /// # Panics
    /// Unwinds with the typed error if a collective fails.
    #[track_caller]
    pub fn input<const D: usize, K: Kind>(
        &self,
        at: usize,
        operand: impl Into<Operand<D, K>>,
    ) -> Tensor<D, K> {
        self.localize(at, operand.into().tensor)
    }

    #[track_caller]
    pub(super) fn localize<const D: usize, K: Kind>(
        &self,
        at: usize,
        tensor: DTensor<D, K>,
    ) -> Tensor<D, K> {
        let to = &self.0.inputs[at];
        if to.is_here() {
            return tensor.local;
        }
        to.redistribute(
            tensor.local,
            &tensor.spec,
            tensor.handles.get().map(|handles| &**handles),
        )
        .or_unwind()
    }

    /// Returns the DTensor of output `at`, of which this rank has the local tensor `local`.
    ///
    /// # Panics
    /// Unwinds with [`OutputShape`](DTensorError::OutputShape) if the shape of `local` is not the
    /// one that the rule determines.
    #[inline(always)]
    #[track_caller]
    pub fn output<const D: usize, K: Kind>(&self, at: usize, local: Tensor<D, K>) -> DTensor<D, K> {
        // Every result is checked: the key of a faulty rule may lack an argument on which the shape
        // depends.
        let found = local.shape();
        if found != self.0.outputs[at].local {
            self.output_shape_error(at, &found).unwind();
        }
        let spec = self.output_spec(at, local.dtype());
        DTensor::from_parts(local, spec)
    }

    /// Returns the name of the operator.
    pub(super) fn name(&self) -> &'static str {
        self.0.inputs[0].operator
    }

    /// Returns true if every input is used as it is.
    pub(super) fn is_direct(&self) -> bool {
        self.0.is_direct
    }

    /// Returns true if all outputs are empty and the local operator does not support empty tensors.
    pub(super) fn is_blank(&self) -> bool {
        self.0.is_blank
    }

    /// Returns true if this rank's local tensor of an input has no elements.
    pub(super) fn has_empty_part(&self) -> bool {
        self.0.has_empty_part
    }

    /// Returns the spec to which input `at` is redistributed.
    pub fn input_spec(&self, at: usize) -> &Arc<DTensorSpec> {
        &self.0.inputs[at].spec
    }

    /// Returns the interval of dimension `dim` that this rank's shard of input `at` covers.
    pub fn input_range(&self, at: usize, dim: usize) -> Range<usize> {
        self.0.inputs[at].spec.local_range(dim)
    }

    /// Returns the number of outputs.
    #[inline]
    pub fn outputs(&self) -> usize {
        self.0.outputs.len()
    }

    /// Returns the layout of output `at`.
    pub fn output_layout(&self, at: usize) -> &Layout {
        &self.0.outputs[at].layout
    }

    /// Returns the interval of each dimension of output `at` that the rank at `coordinate` holds.
    pub(super) fn output_slices(&self, at: usize, coordinate: &[usize]) -> Vec<Range<usize>> {
        let output = &self.0.outputs[at];
        output.layout.local_slices(&output.shape, coordinate)
    }

    /// Returns the shape of this rank's local tensor of output `at`.
    pub fn output_shape(&self, at: usize) -> &Shape {
        &self.0.outputs[at].local
    }

    /// Returns the spec of output `at` for local results of `dtype`.
    fn output_spec(&self, at: usize, dtype: DType) -> Arc<DTensorSpec> {
        let output = &self.0.outputs[at];
        let mesh = self.0.inputs[0].spec.mesh();
        let make = || {
            let spec =
                DTensorSpec::decided(mesh, output.layout.clone(), output.shape.clone(), dtype);
            spec.with_terms(output.terms.clone()).shared()
        };
        let spec = output.spec.get_or_init(make);
        if spec.dtype() == dtype {
            spec.clone()
        } else {
            make()
        }
    }

    #[cold]
    fn output_shape_error(&self, at: usize, found: &[usize]) -> Error {
        let operator = self.name();
        let expected = self.0.outputs[at].local.to_vec();
        DTensorError::OutputShape {
            operator,
            output: at,
            found: found.to_vec(),
            expected,
        }
        .into()
    }
}

struct OperatorCacheEntry {
    hash: u64,
    rule: Box<dyn Any>,
    /// Keeps the specs alive, so that no other spec can get one of their addresses.
    inputs: SmallVec<[(Arc<DTensorSpec>, Option<PlacementConstraint>); 3]>,
    /// Number of the [cost model](super::CostModel) that chose the strategy.
    model: u32,
    operator: Rc<Operator>,
}

impl OperatorCacheEntry {
    #[inline(always)]
    fn is_of<R: ShardingRule>(&self, rule: &R, inputs: &[Arg<'_>], scope: DecisionScope) -> bool {
        self.inputs.len() == inputs.len()
            && self.inputs.iter().zip(inputs).all(|((spec, pin), input)| {
                Arc::ptr_eq(spec, input.spec) && pin.as_ref() == input.pin
            })
            && self.model == scope.model
            && self.rule.downcast_ref::<R>() == Some(rule)
    }
}

/// Cache of decisions by rule and inputs.
#[derive(Default)]
struct Decisions {
    hasher: DefaultHashBuilder,
    entries: RefCell<HashTable<OperatorCacheEntry>>,
}

thread_local! {
    static DECISIONS: Decisions = Decisions::default();
}

fn decision<R: ShardingRule>(rule: &R, inputs: &[Arg<'_>]) -> Result<Rc<Operator>> {
    let scope = DecisionScope::current();
    if scope.explained {
        explain::record(rule, inputs, scope)?;
    }
    DECISIONS.with(|decisions| decisions.of(rule, inputs, scope))
}

impl Decisions {
    fn of<R: ShardingRule>(
        &self,
        rule: &R,
        inputs: &[Arg<'_>],
        scope: DecisionScope,
    ) -> Result<Rc<Operator>> {
        let mut hasher = self.hasher.build_hasher();
        (TypeId::of::<R>(), rule).hash(&mut hasher);
        inputs
            .iter()
            .for_each(|input| hasher.write_usize(Arc::as_ptr(input.spec).addr()));
        let hash = hasher.finish();
        if let Some(known) = self
            .entries
            .borrow()
            .find(hash, |entry| entry.is_of(rule, inputs, scope))
        {
            return Ok(known.operator.clone());
        }
        self.add(hash, rule, inputs, scope)
    }

    /// Resolves the sharding and adds it to the cache.
    #[cold]
    fn add<R: ShardingRule>(
        &self,
        hash: u64,
        rule: &R,
        inputs: &[Arg<'_>],
        scope: DecisionScope,
    ) -> Result<Rc<Operator>> {
        let operator = Rc::new(Operator(resolve_sharding(rule, inputs, scope)?));
        // The specs of a finished launch are not shared, so the entry would never be found.
        if inputs[0].spec.mesh().world().is_finished() {
            return Ok(operator);
        }
        let entry = OperatorCacheEntry {
            hash,
            rule: Box::new(rule.clone()),
            inputs: inputs
                .iter()
                .map(|input| (input.spec.clone(), input.pin.cloned()))
                .collect(),
            model: scope.model,
            operator: operator.clone(),
        };
        let mut entries = self.entries.borrow_mut();
        if entries.len() >= CAPACITY {
            entries.clear();
        }
        entries.insert_unique(hash, entry, |entry| entry.hash);
        Ok(operator)
    }
}
