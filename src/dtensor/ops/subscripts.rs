//! [`Subscripts`]: the axes of an operator's inputs and outputs, parsed from einsum letters.
//!
//! The text of a rule, such as `..?mk, ..?kn -> ..mn`, is parsed into patterns. For inputs with a
//! known number of dimensions, a pattern assigns an axis to each of them. The strategies of a rule,
//! the checks of its inputs and the shapes of its outputs follow from the axes alone.

use burn::tensor::Shape;
use smallvec::SmallVec;

use super::placements::{AVG, R, S, SUM};
use super::{Strategy, strategy};
use crate::placement::Placement;

/// An axis of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Axis {
    /// A letter or [`DOTS`].
    pub(super) name: char,
    /// Index among the axes of this name. Those of the dots are counted from the right.
    pub(super) index: usize,
}

/// Name of the axes that an ellipsis stands for.
pub(super) const DOTS: char = '.';

/// One dimension of an input or output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dim {
    /// An axis. If it `repeats`, a length of 1 is broadcast.
    Axis { axis: Axis, repeats: bool },
    /// A dimension of any length that is not sharded.
    Any,
    /// A dimension of length 1.
    One,
}

impl Dim {
    pub(super) fn axis(self) -> Option<Axis> {
        match self {
            Self::Axis { axis, .. } => Some(axis),
            Self::Any | Self::One => None,
        }
    }
}

/// Dimensions of an input or output.
pub(super) type SubscriptDims = SmallVec<[Dim; 6]>;

/// Pattern of one operand.
#[derive(Debug)]
struct Pattern<'a> {
    text: &'a str,
    parts: SmallVec<[SubscriptToken; 4]>,
    /// True for `operand*`: any number of such operands.
    many: bool,
    /// True for `+ operand`, which is added to the result of the others.
    added: bool,
}

#[derive(Debug, Clone, Copy)]
enum SubscriptToken {
    Dim(Dim),
    Dots { repeats: bool },
}

impl<'a> Pattern<'a> {
    /// Parses `operand, operand + operand`.
    fn list(text: &'a str) -> SmallVec<[Self; 4]> {
        let operands = text.split(',').flat_map(|list| list.split('+').enumerate());
        let operands = operands
            .map(|(at, text)| (at > 0, text.trim()))
            .filter(|(_, text)| !text.is_empty());
        operands
            .map(|(added, text)| Self::new(text, added))
            .collect()
    }

    fn new(text: &'a str, added: bool) -> Self {
        let many = text.ends_with('*');
        let text = text.trim_end_matches('*');
        let mut parts: SmallVec<[SubscriptToken; 4]> = SmallVec::new();
        let mut signs = text.chars();
        while let Some(sign) = signs.next() {
            let part = match sign {
                DOTS => {
                    signs.next();
                    SubscriptToken::Dots { repeats: false }
                }
                '_' => SubscriptToken::Dim(Dim::Any),
                '1' => SubscriptToken::Dim(Dim::One),
                '?' => match parts.pop().expect("`?` follows an axis") {
                    SubscriptToken::Dots { .. } => SubscriptToken::Dots { repeats: true },
                    SubscriptToken::Dim(Dim::Axis { axis, .. }) => SubscriptToken::Dim(Dim::Axis {
                        axis,
                        repeats: true,
                    }),
                    SubscriptToken::Dim(other) => SubscriptToken::Dim(other),
                },
                name => SubscriptToken::Dim(Dim::Axis {
                    axis: Axis { name, index: 0 },
                    repeats: false,
                }),
            };
            parts.push(part);
        }
        Self {
            text,
            parts,
            many,
            added,
        }
    }

    /// Returns the token at the operator's dimensions, and whether the dots repeat, if the pattern
    /// has the form `..d..`.
    fn around(&self) -> Option<(SubscriptToken, bool)> {
        match self.parts[..] {
            [
                SubscriptToken::Dots { repeats },
                own @ SubscriptToken::Dim(_),
                SubscriptToken::Dots { .. },
            ] => Some((own, repeats)),
            _ => None,
        }
    }

    /// Returns the number of dimensions that the dots stand for in an operand of `rank` dimensions,
    /// or `None` if it does not fit.
    fn dots(&self, rank: usize, at: &[usize]) -> Option<usize> {
        if self.around().is_some() {
            return rank
                .checked_sub(at.len())
                .filter(|_| at.iter().all(|&dim| dim < rank));
        }
        let dots = rank.checked_sub(self.letters())?;
        let has_dots = self
            .parts
            .iter()
            .any(|part| matches!(part, SubscriptToken::Dots { .. }));
        (dots == 0 || has_dots).then_some(dots)
    }

    /// Describes the required number of dimensions, for messages.
    fn wanted(&self, at: &[usize]) -> String {
        match (self.around(), at.last()) {
            (Some(_), Some(last)) => format!("{} dimensions or more", last + 1),
            _ if self.parts.len() > self.letters() => {
                format!("{} dimensions or more", self.letters())
            }
            _ => format!("{} dimensions", self.letters()),
        }
    }

    fn letters(&self) -> usize {
        self.parts
            .iter()
            .filter(|part| matches!(part, SubscriptToken::Dim(_)))
            .count()
    }

    /// Returns the dimensions if the dots stand for `dots` of them. `own` distinguishes the axes of
    /// the operator's dimensions in several operands.
    fn dims(&self, dots: usize, at: &[usize], own: usize) -> SubscriptDims {
        let dotted = |index, repeats| Dim::Axis {
            axis: Axis { name: DOTS, index },
            repeats,
        };
        let indexed = |dim: Dim, index: usize| match dim {
            Dim::Axis { axis, repeats } => Dim::Axis {
                axis: Axis { index, ..axis },
                repeats,
            },
            other => other,
        };
        if let Some((SubscriptToken::Dim(dim), repeats)) = self.around() {
            let mut left = dots;
            return (0..dots + at.len())
                .map(|place| match at.iter().position(|&at| at == place) {
                    Some(index) => indexed(dim, index + own * at.len()),
                    None => {
                        left -= 1;
                        dotted(left, repeats)
                    }
                })
                .collect();
        }
        let mut dims = SubscriptDims::new();
        for part in &self.parts {
            match *part {
                SubscriptToken::Dim(dim) => dims.push(dim),
                SubscriptToken::Dots { repeats } => {
                    dims.extend((0..dots).rev().map(|index| dotted(index, repeats)))
                }
            }
        }
        dims
    }
}

/// Axes of all dimensions of an operator's inputs and outputs.
#[derive(Debug)]
pub(super) struct Subscripts {
    pub(super) inputs: SmallVec<[SubscriptDims; 4]>,
    pub(super) outputs: SmallVec<[SubscriptDims; 2]>,
    /// Inputs that are added to the result of the others.
    pub(super) added: SmallVec<[usize; 1]>,
}

impl Subscripts {
    /// Parses `text` for inputs of these shapes. `at` are the operator's dimensions, and `outputs`
    /// is the number of outputs if the text has an output `operand*`.
    ///
    /// # Errors
    /// A description of the input that does not fit.
    pub(super) fn new(
        text: &str,
        at: &[usize],
        inputs: &[Shape],
        outputs: usize,
    ) -> Result<Self, String> {
        let (left, right) = text
            .split_once("->")
            .expect("the text of a rule has an arrow");
        let patterns = Pattern::list(left);
        let mut read = Self {
            inputs: SmallVec::new(),
            outputs: SmallVec::new(),
            added: SmallVec::new(),
        };
        let mut widest = 0;
        let mut strict = None;
        let fixed = patterns.iter().filter(|pattern| !pattern.many).count();
        let many = inputs.len().saturating_sub(fixed);
        if inputs.len() < fixed || (many > 0 && fixed == patterns.len()) {
            return Err(format!(
                "`{text}` takes {fixed} inputs, but {} were passed",
                inputs.len()
            ));
        }
        for pattern in &patterns {
            for _ in 0..if pattern.many { many } else { 1 } {
                let input = read.inputs.len();
                let rank = inputs[input].num_dims();
                let Some(dots) = pattern.dots(rank, at) else {
                    let which = nth(input);
                    let wanted = pattern.wanted(at);
                    return Err(format!(
                        "the {which} input, `{}`, must have {wanted}, but has {rank}",
                        pattern.text
                    ));
                };
                widest = widest.max(dots);
                if pattern
                    .parts
                    .iter()
                    .any(|part| matches!(part, SubscriptToken::Dots { repeats: false }))
                {
                    let (first, as_many) = *strict.get_or_insert((input, dots));
                    if dots != as_many {
                        let first = nth(first);
                        let which = nth(input);
                        let why = format!(
                            "`..` is {as_many} dimensions in the {first} input, but {dots} in the {which}"
                        );
                        return Err(why + ". Make the numbers equal");
                    }
                }
                read.inputs.push(pattern.dims(dots, at, 0));
                read.added.extend(pattern.added.then_some(input));
            }
        }
        for pattern in Pattern::list(right) {
            let count = if pattern.many { outputs } else { 1 };
            read.outputs.extend(
                (0..count).map(|own| pattern.dims(widest, at, if pattern.many { own } else { 0 })),
            );
        }
        Ok(read)
    }

    /// Returns the axes of the inputs: the letters in the order of their first occurrence, then the
    /// dots.
    pub(super) fn axes(&self) -> SmallVec<[Axis; 8]> {
        let mut axes: SmallVec<[Axis; 8]> = SmallVec::new();
        for axis in self.inputs.iter().flatten().filter_map(|dim| dim.axis()) {
            if !axes.contains(&axis) {
                axes.push(axis);
            }
        }
        axes.sort_by_key(|axis| axis.name == DOTS);
        axes
    }

    /// Returns the length of `axis`, or `None` if no input has it.
    ///
    /// # Errors
    /// The inputs that disagree, with the remedy.
    pub(super) fn len(&self, axis: Axis, shapes: &[Shape]) -> Result<Option<usize>, String> {
        let mut known: Option<FoundDim> = None;
        for (input, (dims, shape)) in self.inputs.iter().zip(shapes).enumerate() {
            let mut own_first: Option<FoundDim> = None;
            for (dim, &len) in shape.iter().enumerate() {
                let Some(&Dim::Axis { axis: own, repeats }) = dims.get(dim) else {
                    continue;
                };
                if own != axis {
                    continue;
                }
                let found = FoundDim {
                    input,
                    dim,
                    len,
                    repeats,
                };
                // The two dimensions of a diagonal must have equal lengths: neither is broadcast to
                // the other.
                match own_first {
                    Some(first) if first.len != len => return Err(first.disagreement(axis, found)),
                    first => own_first = first.or(Some(found)),
                }
                known = Some(match known {
                    Some(known) if known.len == len || found.is_repeated_along(known) => known,
                    Some(known) if known.is_repeated_along(found) => found,
                    Some(known) => return Err(known.disagreement(axis, found)),
                    None => found,
                });
            }
        }
        Ok(known.map(|known| known.len))
    }

    /// Returns the shapes of the outputs. `own` are the lengths of axes that no input has, in the
    /// order of their occurrence.
    ///
    /// # Errors
    /// A description of what does not fit.
    pub(super) fn shapes(&self, inputs: &[Shape], own: &[usize]) -> Result<Vec<Shape>, String> {
        for (input, (dims, shape)) in self.inputs.iter().zip(inputs).enumerate() {
            let mut of_one = dims
                .iter()
                .zip(shape.iter())
                .map(|(dim, &len)| *dim == Dim::One && len != 1);
            if let Some(dim) = of_one.position(|misfits| misfits) {
                let which = nth(input);
                let len = shape[dim];
                return Err(format!(
                    "dimension {dim} of the {which} input must have length 1, not {len}"
                ));
            }
        }
        for axis in self.axes() {
            self.len(axis, inputs)?;
        }
        let mut made: SmallVec<[Axis; 4]> = SmallVec::new();
        let mut len = |dim: Dim| -> Result<usize, String> {
            let Some(axis) = dim.axis() else { return Ok(1) };
            if let Some(len) = self.len(axis, inputs)? {
                return Ok(len);
            }
            if !made.contains(&axis) {
                made.push(axis);
            }
            let at = made
                .iter()
                .position(|known| *known == axis)
                .expect("it was added above");
            own.get(at).copied().ok_or_else(|| {
                format!(
                    "only the result has axis `{}`. Set its length with `lens`",
                    axis.name
                )
            })
        };
        self.outputs
            .iter()
            .map(|dims| {
                dims.iter()
                    .map(|&dim| len(dim))
                    .collect::<Result<Vec<_>, _>>()
                    .map(Shape::from)
            })
            .collect()
    }

    /// Returns a strategy for each axis that may be sharded. Outputs without the axis are `reduced`
    /// over the ranks.
    pub(super) fn rows<'a>(
        &'a self,
        shapes: &'a [Shape],
        reduced: Placement,
    ) -> impl Iterator<Item = Strategy> + 'a {
        let cuttable = self
            .axes()
            .into_iter()
            .filter(|axis| !axis.name.is_uppercase());
        cuttable.filter_map(move |axis| {
            let len = self.len(axis, shapes).ok()??;
            let place = |dims: &SubscriptDims| dims.iter().position(|dim| dim.axis() == Some(axis));
            // A diagonal is not sharded.
            if self
                .inputs
                .iter()
                .chain(&self.outputs)
                .any(|dims| dims.iter().filter(|dim| dim.axis() == Some(axis)).count() > 1)
            {
                return None;
            }
            let outputs: SmallVec<[Placement; 2]> = self
                .outputs
                .iter()
                .map(|dims| place(dims).map_or(reduced, S))
                .collect();
            let sums = outputs.contains(&SUM);
            let mut inputs: SmallVec<[Placement; 4]> = SmallVec::new();
            for (input, (dims, shape)) in self.inputs.iter().zip(shapes).enumerate() {
                inputs.push(match place(dims).filter(|&dim| shape[dim] == len) {
                    Some(dim) => S(dim),
                    None if sums && self.added.contains(&input) => SUM,
                    None => R,
                });
            }
            let row = strategy(inputs, outputs);
            Some(if sums {
                row.with_partial_inputs(&self.added)
            } else {
                row
            })
        })
    }

    /// Returns the strategies of an operator that is linear in each of the inputs `linear`: a
    /// partial sum or average of one input passes through.
    pub(super) fn linear<'a>(&'a self, linear: &'a [usize]) -> impl Iterator<Item = Strategy> + 'a {
        let row = |own: usize, partial: Placement, added: Placement| {
            strategy(
                (0..self.inputs.len()).map(|at| match at {
                    at if at == own => partial,
                    at if self.added.contains(&at) => added,
                    _ => R,
                }),
                self.outputs.iter().map(|_| partial),
            )
            .with_partial_inputs(&self.added)
        };
        let rows = move |&own: &usize| {
            // A value that all ranks add is its own average.
            let averages = [R, AVG]
                .into_iter()
                .take(1 + usize::from(!self.added.is_empty()));
            std::iter::once(row(own, SUM, SUM))
                .chain(averages.map(move |added| row(own, AVG, added)))
                .collect::<SmallVec<[_; 3]>>()
        };
        linear.iter().flat_map(rows)
    }
}

/// A dimension of an input that belongs to an axis.
#[derive(Debug, Clone, Copy)]
struct FoundDim {
    input: usize,
    dim: usize,
    len: usize,
    repeats: bool,
}

impl FoundDim {
    fn is_repeated_along(self, other: Self) -> bool {
        self.repeats && self.len == 1 && other.len != 1
    }

    fn disagreement(self, axis: Axis, other: Self) -> String {
        let (len, input, second) = (self.len, nth(self.input), nth(other.input));
        let remedy = if self.repeats || other.repeats {
            "Make them equal, or one of them 1"
        } else {
            "Make them equal"
        };
        match axis.name {
            DOTS => format!(
                "dimension {} of the {input} input is {len} and dimension {} of the {second} {}. {remedy}",
                self.dim, other.dim, other.len
            ),
            name => format!(
                "axis `{name}` is {len} in the {input} input and {} in the {second}. {remedy}",
                other.len
            ),
        }
    }
}

/// Returns the ordinal of an input: `first` for 0.
fn nth(input: usize) -> String {
    let known = ["first", "second", "third", "fourth", "fifth"].get(input);
    known.map_or_else(|| format!("{}th", input + 1), ToString::to_string)
}
