//! [`Copies`]: a list of copies from several tensors to several others, as one operation.

use burn::tensor::Shape;

/// `rows` runs of `run` adjacent elements, copied from one tensor to another.
///
/// ```text
/// source   from ->  x x x . . x x x . .      run 3, rows 2, from_stride 5
/// target   to ->    x x x x x x              to_stride 3
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Segment {
    /// Which source.
    pub source: usize,
    /// Which target.
    pub target: usize,
    /// The first element in the source.
    pub from: usize,
    /// The first element in the target.
    pub to: usize,
    /// How many runs.
    pub rows: usize,
    /// Adjacent elements of each.
    pub run: usize,
    /// From the start of a run to that of the next, in the source.
    pub from_stride: usize,
    /// The same in the target.
    pub to_stride: usize,
}

impl Segment {
    /// One run of `len` elements.
    pub fn run(source: usize, target: usize, from: usize, to: usize, len: usize) -> Self {
        Self { source, target, from, to, rows: 1, run: len, from_stride: len, to_stride: len }
    }

    /// The same elements in the fewest runs.
    fn merged(self) -> Self {
        let Self { rows, run, from_stride, to_stride, .. } = self;
        match run == from_stride && run == to_stride {
            true => Self { rows: 1, run: rows * run, from_stride: rows * run, to_stride: rows * run, ..self },
            false => self,
        }
    }

    /// Elements copied.
    pub fn len(&self) -> usize {
        self.rows * self.run
    }
}

/// Copies between row-major tensors; what no segment writes in a target is zero.
///
/// No element of a target is written twice. Made once for a unit, and used in every step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Copies {
    /// What is read.
    pub sources: Vec<Shape>,
    /// What is made.
    pub targets: Vec<Shape>,
    /// None of them is empty.
    pub segments: Vec<Segment>,
}

impl Copies {
    /// Of these segments, those without elements left out.
    pub fn new(sources: Vec<Shape>, targets: Vec<Shape>, segments: Vec<Segment>) -> Self {
        let segments = segments.into_iter().map(Segment::merged).filter(|segment| segment.len() > 0).collect();
        Self { sources, targets, segments }
    }

    /// Elements copied.
    pub fn copied(&self) -> usize {
        self.segments.iter().map(Segment::len).sum()
    }
}
