//! [`Resolved`]: a decided operator, and the cache of decisions.
//!
//! A decision is a search over placements; a training step repeats the same few. The key is the
//! rule and the inputs' specs. Specs are interned, so a repeated operator costs a hash of a few
//! pointers and allocates nothing.

use std::any::{Any, TypeId};
use std::cell::{OnceCell, RefCell};
use std::hash::{BuildHasher, Hash, Hasher};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;

use super::choose::{Choice, Dims, Operand, choose};
use super::policy::RedistributePolicy;
use super::rule::{Rule, Strategy};
use crate::Result;
use crate::dtensor::redistribute::Route;
use crate::dtensor::spec::CAPACITY;
use crate::dtensor::{DTensorError, DTensorSpec};
use crate::placement::{Layout, Placement};

/// How one operator runs on inputs of certain specs.
#[derive(Debug)]
pub struct Resolved {
    pub(super) inputs: SmallVec<[Input; 3]>,
    pub(super) outputs: SmallVec<[Output; 1]>,
}

/// One input, as the local operator takes it.
#[derive(Debug)]
pub(super) struct Input {
    /// The layout it is brought to.
    pub(super) spec: Arc<DTensorSpec>,
    /// Whether that is another one than it comes in.
    pub(super) moves: bool,
    /// Mesh dimensions on which ranks compute different things with one replicated value.
    pub(super) varying: Dims,
}

/// One output.
#[derive(Debug)]
pub(super) struct Output {
    layout: Layout,
    shape: Shape,
    local: Shape,
    terms: Option<Arc<str>>,
    /// Made when the first local result shows its element type.
    spec: OnceCell<Arc<DTensorSpec>>,
}

impl Resolved {
    /// What input `at` is brought to.
    pub fn input(&self, at: usize) -> &Arc<DTensorSpec> {
        &self.inputs[at].spec
    }

    /// Where this rank's part of input `at` lies along `dim`.
    pub fn input_range(&self, at: usize, dim: usize) -> Range<usize> {
        self.inputs[at].spec.local_range(dim)
    }

    /// The layout of output `at`.
    pub fn output(&self, at: usize) -> &Layout {
        &self.outputs[at].layout
    }

    /// Shape of this rank's part of output `at`.
    pub fn output_shape(&self, at: usize) -> &Shape {
        &self.outputs[at].local
    }

    /// Refuses to move an input, but for where the caller pinned it: that was asked for.
    fn check_unmoved<R: Rule>(&self, rule: &R, inputs: &[&Arc<DTensorSpec>]) -> Result<()> {
        for (input, (from, to)) in inputs.iter().zip(&self.inputs).enumerate() {
            let implicit = to.moves && rule.pinned(input).is_none();
            let (from, to) = (from.layout(), to.spec.layout());
            if !implicit || Route::between(from, to)?.steps().is_empty() {
                continue;
            }
            return Err(DTensorError::implicit(rule.name(), input, from, to).into());
        }
        Ok(())
    }

    /// The spec of output `at` for local results of `dtype`.
    pub(super) fn output_spec(&self, at: usize, dtype: DType) -> Arc<DTensorSpec> {
        let output = &self.outputs[at];
        let mesh = self.inputs[0].spec.mesh();
        let make = || {
            let spec = DTensorSpec::decided(mesh, output.layout.clone(), output.shape.clone(), dtype);
            spec.with_terms(output.terms.clone()).shared()
        };
        let spec = output.spec.get_or_init(make);
        if spec.dtype() == dtype { spec.clone() } else { make() }
    }

    /// Holds the first local result of output `at` to the shape that the rule promised; with debug
    /// assertions every one, since the key of a rule may lack an argument.
    ///
    /// # Panics
    /// If it has another: no tensor would be what its spec says.
    pub(super) fn check_output(&self, at: usize, made: impl FnOnce() -> Shape) {
        let output = &self.outputs[at];
        if cfg!(debug_assertions) || output.spec.get().is_none() {
            let (made, promised) = (made(), &output.local);
            assert!(made == *promised, "the local operator made {made} of output {at}, its rule says {promised}");
        }
    }
}

struct Entry {
    hash: u64,
    rule: Box<dyn Any>,
    /// Alive as long as the entry, so that no other spec can have their addresses.
    inputs: SmallVec<[Arc<DTensorSpec>; 3]>,
    resolved: Rc<Resolved>,
}

thread_local! {
    static DECISIONS: RefCell<HashTable<Entry>> = const { RefCell::new(HashTable::new()) };
    static HASHER: DefaultHashBuilder = DefaultHashBuilder::default();
}

/// The decision for `rule` on inputs of these specs, from this thread's cache.
///
/// # Errors
/// [`DTensorError::MeshMismatch`] and [`DTensorError::RankMismatch`]; [`DTensorError::Operands`] of the rule;
/// [`DTensorError::ImplicitRedistribution`] under [`RedistributePolicy::Deny`].
pub fn resolve<R: Rule>(rule: &R, inputs: &[&Arc<DTensorSpec>]) -> Result<Rc<Resolved>> {
    let resolved = decision(rule, inputs)?;
    if RedistributePolicy::current() == RedistributePolicy::Deny {
        resolved.check_unmoved(rule, inputs)?;
    }
    Ok(resolved)
}

fn decision<R: Rule>(rule: &R, inputs: &[&Arc<DTensorSpec>]) -> Result<Rc<Resolved>> {
    let hash = HASHER.with(|hasher| {
        let mut hasher = hasher.build_hasher();
        (TypeId::of::<R>(), rule).hash(&mut hasher);
        inputs.iter().for_each(|spec| hasher.write_usize(Arc::as_ptr(spec).addr()));
        hasher.finish()
    });
    let same = |entry: &Entry| {
        entry.inputs.iter().map(Arc::as_ptr).eq(inputs.iter().map(|spec| Arc::as_ptr(spec)))
            && entry.rule.downcast_ref::<R>() == Some(rule)
    };
    let known = DECISIONS.with_borrow(|table| table.find(hash, same).map(|entry| entry.resolved.clone()));
    if let Some(resolved) = known {
        return Ok(resolved);
    }
    let resolved = Rc::new(decide(rule, inputs)?);
    // The specs of a finished launch are not shared, so the entry would never be found.
    if inputs[0].mesh().world().is_finished() {
        return Ok(resolved);
    }
    let entry = Entry {
        hash,
        rule: Box::new(rule.clone()),
        inputs: inputs.iter().map(|&spec| spec.clone()).collect(),
        resolved: resolved.clone(),
    };
    DECISIONS.with_borrow_mut(|table| {
        if table.len() >= CAPACITY {
            table.clear();
        }
        let rehash = |entry: &Entry| entry.hash;
        table.insert_unique(hash, entry, rehash);
    });
    Ok(resolved)
}

fn decide<R: Rule>(rule: &R, inputs: &[&Arc<DTensorSpec>]) -> Result<Resolved> {
    let mesh = inputs[0].mesh();
    for other in &inputs[1..] {
        inputs[0].check_same_mesh(other)?;
    }
    let shapes: Vec<Shape> = inputs.iter().map(|spec| spec.shape().clone()).collect();
    let output_shapes = rule.outputs(&shapes)?;
    let mut rows = rows(rule, &shapes, &output_shapes);
    let dtypes: Vec<DType> = inputs.iter().map(|spec| spec.dtype()).collect();
    rows.retain(|row| row.takes(&dtypes));
    let operand = |spec: &&Arc<DTensorSpec>| (spec.layout().clone(), spec.shape().clone(), spec.dtype().is_float());
    let owned: Vec<_> = inputs.iter().map(operand).collect();
    let operands: Vec<_> =
        owned.iter().map(|(layout, shape, float)| Operand { layout, shape, differentiable: *float }).collect();
    let choice = choose(mesh.shape(), &operands, output_shapes.len(), &rows, rule.takes_empty_parts());
    let Choice { inputs: targets, outputs, varying } = choice.ok_or_else(|| DTensorError::NoStrategy {
        operator: rule.name(),
        inputs: inputs.iter().map(|spec| spec.layout().to_string()).collect(),
    })?;
    let decided = inputs.iter().zip(targets).zip(varying).map(|((&spec, target), varying)| {
        let moves = spec.layout() != &target;
        let spec = if moves { spec.with_layout(target)?.shared() } else { spec.clone() };
        Ok(Input { spec, moves, varying })
    });
    let decided: Result<_> = decided.collect();
    let terms = outputs.iter().any(Layout::has_partial).then(|| terms(inputs));
    let outputs = output_shapes.into_iter().zip(outputs).map(|(shape, layout)| {
        let coordinate = inputs[0].coordinate();
        let local = Shape::from(layout.local_shape(&shape, coordinate));
        Output { layout, shape, local, terms: terms.clone(), spec: OnceCell::new() }
    });
    Ok(Resolved { inputs: decided?, outputs: outputs.collect() })
}

/// What the terms of a pending reduction come from: where those of the inputs do, or else the inputs.
///
/// Of several the least, so that a sum that grows from step to step does not grow here as well.
fn terms(inputs: &[&Arc<DTensorSpec>]) -> Arc<str> {
    if let Some(terms) = inputs.iter().filter_map(|spec| spec.terms()).min() {
        return terms.clone();
    }
    let shapes: Vec<_> = inputs.iter().map(|spec| format!("{:?}", &spec.shape()[..])).collect();
    shapes.join(" and ").into()
}

/// The rule's table, with the all-Replicate row in front.
fn rows<R: Rule>(rule: &R, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
    let replicate = |n| std::iter::repeat_n(Placement::Replicate, n);
    let mut rows = vec![super::strategy(replicate(inputs.len()), replicate(outputs.len()))];
    rows.extend(rule.strategies(inputs, outputs));
    let fits = |row: &Strategy| (0..inputs.len()).all(|at| rule.pinned(at).is_none_or(|pin| row.inputs[at] == pin));
    rows.retain(fits);
    rows
}
