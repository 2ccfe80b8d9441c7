//! [`Draft`]: a program that is being drawn.
//!
//! A step is accepted after it has run on its operands' values, with every float moved a little,
//! there and back: where results or gradients jump (a kink, a tie, a rounding) or run away, what a
//! sharded run must give is not certain, and the step is left out. So an operator's entry need not
//! know where its kinks are.

use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::placement::Layout;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::layouts;
use super::operators::Operator;
use super::profile::Profile;
use super::program::{Id, Leaf, Program, Step, weighed};
use super::value::{Data, ElementKind, Value};
use crate::layouts::uneven;

/// The meshes of programs.
const MESHES: [&[usize]; 15] = [
    &[1],
    &[2],
    &[2],
    &[3],
    &[4],
    &[5],
    &[1, 2],
    &[2, 1],
    &[2, 2],
    &[2, 3],
    &[2, 3],
    &[2, 3],
    &[3, 2],
    &[1, 3, 2],
    &[2, 2, 2],
];

/// The most elements of an input, and of a result.
const INPUT: usize = 240;
const RESULT: usize = 600;

/// A program so far, with what its values are on ordinary tensors.
pub struct Draft {
    pub rng: StdRng,
    program: Program,
    known: Vec<Known>,
    device: Device,
}

/// What burn computes in single precision whatever the dtype: the last bits of a double decide how
/// it is rounded.
const IN_SINGLE_PRECISION: [&str; 7] = [
    "hard_sigmoid",
    "hard_swish",
    "rfft",
    "irfft",
    "cfft",
    "stft",
    "istft",
];

/// Operators that burn computes of bytes with checks for overflow, where they are compiled in:
/// terms of a sum may overflow where the sum does not.
const CHECKED_FOR_OVERFLOW: [&str; 3] = ["cumsum", "scatter", "scatter_nd"];

/// A value of the program.
#[derive(Clone)]
struct Known {
    data: Data,
    /// Whether it has the dtype that other values of its kind have.
    usable: bool,
}

/// Draws the program of this seed.
pub fn draw(seed: u64, operators: &[Operator]) -> Program {
    let mut attempt = 0;
    loop {
        let mut draft = Draft::new(seed, attempt);
        let length = draft.rng.random_range(5..=20);
        // Some programs end short of it: one that has grown too large has no more room.
        for _ in 0..length * 4 {
            if draft.program.steps.len() < length {
                let entry = draft.rng.random_range(0..operators.len());
                draft.extend(entry, &operators[entry]);
            }
        }
        draft.program.prune();
        // What leads to no loss is left behind in burn's graph of the leaves, and a second backward
        // may fail: see `burn_limits`.
        if draft
            .program
            .ends()
            .iter()
            .any(|&id| draft.known[id].data.kind != ElementKind::Float)
        {
            draft.program.rounds = 1;
        }
        if draft.program.steps.len() >= 5 && draft.is_well_conditioned() {
            return draft.program;
        }
        attempt += 1;
    }
}

/// Returns the kinds of the operands that the operator takes.
pub fn operand_kinds(operator: &Operator) -> BTreeSet<ElementKind> {
    let drawn = |seed| {
        let mut draft = Draft::new(seed, 0);
        let step = (operator.draw)(&mut draft)?;
        Some(
            step.operands
                .iter()
                .map(|&id| draft.known[id].data.kind)
                .collect(),
        )
    };
    // What is drawn first may be nothing that it could take.
    (0..100)
        .find_map(drawn)
        .unwrap_or_else(|| panic!("{} is never drawn", operator.name))
}

impl Draft {
    fn new(seed: u64, attempt: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ attempt << 48);
        let mesh = MESHES[rng.random_range(0..MESHES.len())].to_vec();
        let profile = Profile::any(&mut rng);
        let (leaves, steps) = (Vec::new(), Vec::new());
        let (rounds, moves) = (
            if rng.random_bool(0.3) { 2 } else { 1 },
            rng.random_bool(0.5),
        );
        let (watches, probes) = (rng.random_bool(0.6), rng.random_bool(0.8));
        let program = Program {
            seed,
            mesh,
            profile,
            leaves,
            steps,
            rounds,
            moves,
            watches,
            probes,
        };
        Self {
            rng,
            program,
            known: Vec::new(),
            device: Device::flex().autodiff(),
        }
    }

    /// Adds one step of the operator, and perhaps a redistribution of a result; or nothing.
    fn extend(&mut self, entry: usize, operator: &Operator) {
        let (leaves, steps, known) = (
            self.program.leaves.len(),
            self.program.steps.len(),
            self.known.len(),
        );
        let named = |step| Step {
            operator: operator.name,
            entry: Some(entry),
            ..step
        };
        let drawn = (operator.draw)(self).and_then(|step| self.accept(named(step)));
        let Some(results) = drawn else {
            self.program.leaves.truncate(leaves);
            self.program.steps.truncate(steps);
            self.known.truncate(known);
            return;
        };
        if !results.is_empty() && self.rng.random_bool(0.4) {
            let id = results.start + self.below(results.len());
            let step = self.redistribution(id);
            self.accept(step);
        }
    }

    fn redistribution(&mut self, id: Id) -> Step {
        let data = &self.known[id].data;
        let layout = layouts::target(
            &mut self.rng,
            &self.program.mesh,
            data.shape.len(),
            data.kind,
        );
        let layout = uneven(layout, &data.shape, self.program.seed ^ (id as u64) << 32);
        let text = format!("\"{layout}\"");
        let redistribute = move |operands: Vec<Value>| {
            let moved = operands
                .into_iter()
                .map(|value| value.redistributed(&layout));
            moved
                .map(|value| value.unwrap_or_else(|error| error.unwind()))
                .collect()
        };
        Step {
            operator: "redistribute",
            entry: None,
            operands: vec![id],
            results: Vec::new(),
            plain: Arc::new(|operands| operands),
            sharded: Arc::new(redistribute),
            text: "x.redistribute(layout)",
            names: vec!["x"],
            arguments: vec![("layout", text)],
        }
    }

    /// Adds the step, if its results are certain.
    pub fn accept(&mut self, mut step: Step) -> Option<Range<Id>> {
        let profile = self.program.profile;
        if profile.float == DType::F64 && IN_SINGLE_PRECISION.contains(&step.operator) {
            return None;
        }
        let inputs: Vec<Data> = step
            .operands
            .iter()
            .map(|&id| self.known[id].data.clone())
            .collect();
        let of_bytes = profile.int == DType::U8 && inputs[0].kind == ElementKind::Int;
        if of_bytes && CHECKED_FOR_OVERFLOW.contains(&step.operator) {
            return None;
        }
        // A product of integers may overflow.
        let evaluated = catch_unwind(AssertUnwindSafe(|| self.evaluate(&step, &inputs)));
        let (results, gradients) = evaluated.ok()?;
        let elements = |data: &Data| data.values.len();
        if results
            .iter()
            .any(|data| !profile.holds(data) || elements(data) > RESULT || elements(data) == 0)
        {
            return None;
        }
        if !gradients.iter().flatten().all(|data| profile.holds(data)) {
            return None;
        }
        if inputs.iter().any(|data| data.kind == ElementKind::Float)
            && step.operator != "redistribute"
        {
            let (there, back): (Vec<Data>, Vec<Data>) =
                inputs.iter().map(|data| self.moved(data)).unzip();
            for noisy in [there, back] {
                let (moved, moved_gradients) = self.evaluate(&step, &noisy);
                let steady = |a: &Data, b: &Data| self.is_steady(a, b);
                let all = results.iter().zip(&moved).all(|(a, b)| steady(a, b));
                let by_gradient = |(a, b): (&Option<Data>, &Option<Data>)| match (a, b) {
                    (Some(a), Some(b)) => steady(a, b),
                    (a, b) => a.is_none() && b.is_none(),
                };
                if !all || !gradients.iter().zip(&moved_gradients).all(by_gradient) {
                    return None;
                }
            }
        }
        // The wide dtypes have said that nothing overflows; which dtypes come out, the real ones
        // say.
        let typed = |data: &Data| Data {
            dtype: profile.dtype(data.kind),
            ..data.clone()
        };
        let inputs: Vec<Data> = inputs.iter().map(typed).collect();
        let run = || {
            (step.plain)(
                inputs
                    .iter()
                    .map(|data| data.tensor(&self.device))
                    .collect(),
            )
        };
        // Burn has not every operator for every dtype.
        let real = catch_unwind(AssertUnwindSafe(run)).ok()?;
        let first = self.known.len();
        for (data, real) in results.into_iter().zip(&real) {
            let real = real.full().expect("nothing is sent");
            if data.kind != ElementKind::Float && data.values != real.values {
                self.known.truncate(first);
                return None;
            }
            let ordinary = |dtype, profile: Profile| dtype == profile.dtype(data.kind);
            let usable = data.kind == ElementKind::Bool
                || ordinary(real.dtype, profile) && ordinary(data.dtype, profile.wide());
            // Data are read as inputs of their kind's dtype, whichever their own was.
            let usable =
                usable && (step.operator != "redistribute" || self.known[step.operands[0]].usable);
            self.known.push(Known { data, usable });
        }
        step.results = (first..self.known.len()).collect();
        self.program.steps.push(step);
        Some(first..self.known.len())
    }

    /// What the step makes of `inputs` in double precision, and their gradients.
    fn evaluate(&self, step: &Step, inputs: &[Data]) -> (Vec<Data>, Vec<Option<Data>>) {
        let wide = |data: &Data| Data {
            dtype: self.program.profile.wide().dtype(data.kind),
            ..data.clone()
        };
        let leaves: Vec<Value> = inputs
            .iter()
            .map(|data| wide(data).tensor(&self.device))
            .collect();
        let results = (step.plain)(leaves.iter().map(|leaf| leaf.share()).collect());
        let full = results
            .iter()
            .map(|value| value.full().expect("nothing is sent"))
            .collect();
        let rows = results
            .iter()
            .enumerate()
            .filter_map(|(at, value)| Some((at, value.tracked().ok()??)));
        let terms = rows.map(|(at, row)| weighed(at, row, self.program.profile.is_exact()));
        let grads = terms
            .reduce(|a: Tensor<1>, b| a + b)
            .map(|loss| loss.backward());
        (
            full,
            leaves
                .iter()
                .map(|leaf| leaf.gradient(grads.as_ref()?))
                .collect(),
        )
    }

    /// The floats, each a little off; and as much off to the other side: of elements that tie,
    /// another is the least there.
    fn moved(&mut self, data: &Data) -> (Data, Data) {
        let noise = self.program.profile.noise();
        let (mut there, mut back) = (data.clone(), data.clone());
        if data.kind == ElementKind::Float {
            for (there, back) in there.values.iter_mut().zip(&mut back.values) {
                let by = self.rng.random_range(-noise..noise);
                *there += by;
                *back -= by;
            }
        }
        (there, back)
    }

    fn is_steady(&self, a: &Data, b: &Data) -> bool {
        let bound = if a.kind == ElementKind::Float {
            1e3 * self.program.profile.noise() * a.extent().max(1.0)
        } else {
            0.0
        };
        a.shape == b.shape
            && a.values
                .iter()
                .zip(&b.values)
                .all(|(a, b)| (a - b).abs() <= bound)
    }

    /// Whether small changes of the inputs stay small through the whole program.
    fn is_well_conditioned(&mut self) -> bool {
        let program = self.program.clone();
        let exact = self.evaluate_all(&program);
        let (mut there, mut back) = (program.clone(), program);
        for (there, back) in there.leaves.iter_mut().zip(&mut back.leaves) {
            (there.data, back.data) = self.moved(&there.data);
        }
        let moved = [self.evaluate_all(&there), self.evaluate_all(&back)];
        let holds = |data: &Data| data.values.iter().all(|value| value.abs() < 1e3);
        let fits = |data: &Data| {
            if self.program.profile.is_exact() {
                self.program.profile.holds(data)
            } else {
                holds(data)
            }
        };
        let steady = |moved: &Vec<Data>| {
            exact.len() == moved.len() && exact.iter().zip(moved).all(|(a, b)| self.is_steady(a, b))
        };
        exact.iter().all(fits) && moved.iter().all(steady)
    }

    /// All ends and all gradients, in double precision.
    fn evaluate_all(&self, program: &Program) -> Vec<Data> {
        let profile = program.profile.wide();
        let wide = |leaf: &Leaf| Data {
            dtype: profile.dtype(leaf.data.kind),
            ..leaf.data.clone()
        };
        let leaves: Vec<Value> = program
            .leaves
            .iter()
            .map(|leaf| wide(leaf).tensor(&self.device))
            .collect();
        let ends = program
            .run(
                &leaves,
                |step, operands| (step.plain)(operands),
                |_, _| Ok(()),
            )
            .expect("nothing is sent");
        let mut all: Vec<Data> = ends
            .iter()
            .map(|(_, value)| value.full().expect("nothing is sent"))
            .collect();
        if let Some(grads) = program.backward(&ends).expect("nothing is sent") {
            all.extend(leaves.iter().filter_map(|leaf| leaf.gradient(&grads)));
        }
        all
    }
}

/// What entries of operators ask for.
impl Draft {
    pub fn below(&mut self, bound: usize) -> usize {
        self.rng.random_range(0..bound)
    }

    pub fn chance(&mut self, probability: f64) -> bool {
        self.rng.random_bool(probability)
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A length: 1 to 13, more often short, or one that nested cuts part unevenly (7 over 2 x 3
    /// ranks leaves one in the middle empty).
    pub fn len(&mut self) -> usize {
        match self.below(10) {
            0..5 => 1 + self.below(6),
            5..8 => self.one_of(&[5, 7, 7, 9]),
            _ => 1 + self.below(13),
        }
    }

    pub fn shape<const D: usize>(&self, id: Id) -> [usize; D] {
        self.known[id]
            .data
            .shape
            .as_slice()
            .try_into()
            .expect("an entry knows its operands' dimensions")
    }

    /// A shape of few enough elements.
    pub fn any_shape<const D: usize>(&mut self) -> [usize; D] {
        loop {
            let shape = [0; D].map(|_| self.len());
            if shape.iter().product::<usize>() <= INPUT {
                return shape;
            }
        }
    }

    /// Floats of `D` dimensions, of any shape.
    pub fn any<const D: usize>(&mut self) -> Id {
        self.known_one(ElementKind::Float, |data| {
            data.shape.len() == D && data.extent() <= 20.0
        })
        .unwrap_or_else(|| {
            let shape = self.any_shape::<D>();
            self.leaf(ElementKind::Float, &shape, -2.0..2.0)
        })
    }

    /// Floats of two dimensions to look up rows of: sometimes more rows than a byte counts.
    pub fn table(&mut self) -> Id {
        if self.chance(0.6) {
            return self.any::<2>();
        }
        let shape = [250 + self.below(20), 1 + self.below(2)];
        self.leaf(ElementKind::Float, &shape, -2.0..2.0)
    }

    /// Floats of this shape.
    pub fn floats(&mut self, shape: impl AsRef<[usize]>) -> Id {
        let shape = shape.as_ref();
        self.known_one(ElementKind::Float, |data| {
            data.shape == shape && data.extent() <= 20.0
        })
        .unwrap_or_else(|| self.leaf(ElementKind::Float, shape, -2.0..2.0))
    }

    /// Floats of this shape, inside the range.
    pub fn floats_within(&mut self, shape: impl AsRef<[usize]>, range: Range<f64>) -> Id {
        let shape = shape.as_ref();
        let inside = |data: &Data| {
            data.shape == shape && data.values.iter().all(|value| range.contains(value))
        };
        self.known_one(ElementKind::Float, inside)
            .unwrap_or_else(|| self.leaf(ElementKind::Float, shape, range))
    }

    /// Floats of `D` dimensions, inside the range: known ones are squeezed into it.
    pub fn within<const D: usize>(&mut self, range: Range<f64>) -> Id {
        let id = self.any::<D>();
        if self.known[id]
            .data
            .values
            .iter()
            .all(|value| range.contains(value))
        {
            return id;
        }
        let squeezed = super::operators::squeeze(self, id, D, range.clone());
        match squeezed.and_then(|step| self.accept(step)) {
            Some(results) => results.start,
            None => {
                let shape = self.known[id].data.shape.clone();
                self.leaf(ElementKind::Float, &shape, range)
            }
        }
    }

    /// A shape that broadcasts against `shape`.
    pub fn broadcast<const D: usize>(&mut self, shape: [usize; D]) -> [usize; D] {
        if self.chance(0.6) {
            shape
        } else {
            shape.map(|len| if self.chance(0.5) { 1 } else { len })
        }
    }

    /// Integers of `D` dimensions, of any shape.
    pub fn any_ints<const D: usize>(&mut self) -> Id {
        self.known_one(ElementKind::Int, |data| data.shape.len() == D)
            .unwrap_or_else(|| {
                let shape = self.any_shape::<D>();
                self.leaf(ElementKind::Int, &shape, 0.0..9.0)
            })
    }

    /// Integers of this shape, from 0 to below `bound`.
    pub fn ints(&mut self, shape: impl AsRef<[usize]>, bound: usize) -> Id {
        let bound = if self.program.profile.int == DType::U8 {
            bound.min(256)
        } else {
            bound
        };
        let (shape, range) = (shape.as_ref(), 0.0..bound as f64);
        let fits = |data: &Data| {
            data.shape == shape && data.values.iter().all(|value| range.contains(value))
        };
        self.known_one(ElementKind::Int, fits)
            .unwrap_or_else(|| self.leaf(ElementKind::Int, shape, range))
    }

    /// Booleans of `D` dimensions, of any shape.
    pub fn any_bools<const D: usize>(&mut self) -> Id {
        self.known_one(ElementKind::Bool, |data| data.shape.len() == D)
            .unwrap_or_else(|| {
                let shape = self.any_shape::<D>();
                self.leaf(ElementKind::Bool, &shape, 0.0..2.0)
            })
    }

    /// Booleans of this shape.
    pub fn bools(&mut self, shape: impl AsRef<[usize]>) -> Id {
        let shape = shape.as_ref();
        self.known_one(ElementKind::Bool, |data| data.shape == shape)
            .unwrap_or_else(|| self.leaf(ElementKind::Bool, shape, 0.0..2.0))
    }

    /// A value of the program that will do, one of the later ones; sometimes none, so that there
    /// are new inputs all along.
    fn known_one(&mut self, kind: ElementKind, fits: impl Fn(&Data) -> bool) -> Option<Id> {
        let fits = |known: &Known| known.usable && known.data.kind == kind && fits(&known.data);
        let ids: Vec<Id> = (0..self.known.len())
            .rev()
            .filter(|&id| fits(&self.known[id]))
            .take(6)
            .collect();
        if ids.is_empty() || self.chance(0.15) {
            None
        } else {
            Some(ids[self.below(ids.len())])
        }
    }

    fn leaf(&mut self, kind: ElementKind, shape: &[usize], range: Range<f64>) -> Id {
        let quarters = self.program.profile.is_exact();
        let value = |rng: &mut StdRng| {
            let value = rng.random_range(range.clone());
            match kind {
                ElementKind::Float if quarters => (value * 4.0).ceil() / 4.0,
                // As every float dtype but the narrow one holds it.
                ElementKind::Float => f64::from(value as f32),
                _ => value.floor(),
            }
        };
        let values = (0..shape.iter().product())
            .map(|_| value(&mut self.rng))
            .collect();
        let dtype = self.program.profile.wide().dtype(kind);
        let data = Data {
            kind,
            dtype,
            shape: shape.to_vec(),
            values,
        };
        let layout: Layout = layouts::any(
            &mut self.rng,
            &self.program.mesh,
            shape.len(),
            kind,
            &self.program.profile,
        );
        let id = self.known.len();
        let layout = uneven(layout, shape, self.program.seed ^ (id as u64) << 40);
        self.known.push(Known {
            data: data.clone(),
            usable: true,
        });
        self.program.leaves.push(Leaf { id, data, layout });
        id
    }
}
