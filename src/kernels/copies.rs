//! [`CopyPlan`]: a list of copies from several tensors to several others, as one operation.

use burn::tensor::Shape;

/// `rows` runs of `run` adjacent elements, copied from one tensor to another.
///
/// ```text
/// source   from ->  x x x . . x x x . .      run 3, rows 2, from_stride 5
/// target   to ->    x x x x x x              to_stride 3
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StridedCopy {
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

impl StridedCopy {
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

/// Adjacent elements of a target that no segment writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ZeroFill {
    /// Which target.
    pub target: usize,
    /// The first element.
    pub at: usize,
    /// How many.
    pub len: usize,
}

/// Copies between row-major tensors; what no segment writes in a target is zero.
///
/// Made once for a unit, and used in every step. What executors rely on, and [`new`](Self::new) alone provides:
///
/// 1. every segment lies inside its source and its target;
/// 2. each element of a target belongs to one segment, or to one gap.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CopyPlan {
    /// What is read.
    pub(super) sources: Vec<Shape>,
    /// What is made.
    pub(super) targets: Vec<Shape>,
    /// None of them is empty.
    pub(super) segments: Vec<StridedCopy>,
    /// What is zero.
    pub(super) gaps: Vec<ZeroFill>,
}

#[cfg_attr(not(feature = "testing"), allow(dead_code, reason = "the benchmark looks at them"))]
impl CopyPlan {
    /// Of these segments, those without elements left out.
    ///
    /// # Panics
    /// If a segment leaves its source or its target. That two write one element is noticed where it leaves
    /// others unwritten, and in debug builds everywhere.
    pub fn new(sources: Vec<Shape>, targets: Vec<Shape>, segments: Vec<StridedCopy>) -> Self {
        let mut segments = segments;
        segments.retain_mut(|segment| {
            *segment = segment.merged();
            segment.len() > 0
        });
        let lens = |shapes: &[Shape]| shapes.iter().map(Shape::num_elements).collect::<Vec<_>>();
        let (from, to) = (lens(&sources), lens(&targets));
        for segment in &segments {
            let StridedCopy { source, target, rows, run, from_stride, to_stride, .. } = *segment;
            let from_end = segment.from + (rows - 1) * from_stride + run;
            let to_end = segment.to + (rows - 1) * to_stride + run;
            assert!(from_end <= from[source] && to_end <= to[target], "{segment:?} leaves its source or its target");
        }
        let gaps = gaps(&to, &segments);
        Self { sources, targets, segments, gaps }
    }

    /// What is read.
    pub fn sources(&self) -> &[Shape] {
        &self.sources
    }

    /// What is made.
    pub fn targets(&self) -> &[Shape] {
        &self.targets
    }

    /// Elements copied.
    pub fn copied(&self) -> usize {
        self.segments.iter().map(StridedCopy::len).sum()
    }
}

/// What `segments` leave of targets of `lens` elements.
fn gaps(lens: &[usize], segments: &[StridedCopy]) -> Vec<ZeroFill> {
    let mut left = lens.to_vec();
    for segment in segments {
        let left = &mut left[segment.target];
        *left = left.checked_sub(segment.len()).unwrap_or_else(|| panic!("{segment:?} writes elements again"));
    }
    // A target that is full has no gaps, if no element of it is written twice.
    let open = |target: usize| left[target] > 0 || cfg!(debug_assertions);
    let written = segments.iter().filter(|segment| open(segment.target)).flat_map(|segment| {
        let StridedCopy { target, to, rows, run, to_stride, .. } = *segment;
        (0..rows).map(move |row| (target, to + row * to_stride, run))
    });
    let ends = lens.iter().enumerate().filter(|(target, _)| open(*target)).map(|(target, len)| (target, *len, 0));
    let mut runs: Vec<_> = written.chain(ends).collect();
    runs.sort_unstable();
    let (mut gaps, mut end) = (Vec::new(), (0, 0));
    for (target, at, run) in runs {
        let start = if end.0 == target { end.1 } else { 0 };
        assert!(start <= at, "element {at} of target {target} is written twice");
        if start < at {
            gaps.push(ZeroFill { target, at: start, len: at - start });
        }
        end = (target, at + run);
    }
    gaps
}
