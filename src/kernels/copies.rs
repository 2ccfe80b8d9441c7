//! [`CopyPlan`]: copies from several tensors to several other tensors, executed as one operation.

use burn::tensor::Shape;

/// A strided copy of `rows` runs of `run` adjacent elements from one tensor to another.
///
/// ```text
/// source   from ->  x x x . . x x x . .      run 3, rows 2, from_stride 5
/// target   to ->    x x x x x x              to_stride 3
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct StridedCopy {
    /// Index of the source.
    pub source: usize,
    /// Index of the target.
    pub target: usize,
    /// First element in the source.
    pub from: usize,
    /// First element in the target.
    pub to: usize,
    /// Number of runs.
    pub rows: usize,
    /// Number of adjacent elements in a run.
    pub run: usize,
    /// Distance between the starts of two runs in the source.
    pub from_stride: usize,
    /// Distance between the starts of two runs in the target.
    pub to_stride: usize,
}

impl StridedCopy {
    /// Creates a copy of one run of `len` elements.
    pub fn run(source: usize, target: usize, from: usize, to: usize, len: usize) -> Self {
        Self {
            source,
            target,
            from,
            to,
            rows: 1,
            run: len,
            from_stride: len,
            to_stride: len,
        }
    }

    /// Returns an equivalent copy with the fewest runs.
    fn merged(self) -> Self {
        let Self {
            rows,
            run,
            from_stride,
            to_stride,
            ..
        } = self;
        match run == from_stride && run == to_stride {
            true => Self {
                rows: 1,
                run: rows * run,
                from_stride: rows * run,
                to_stride: rows * run,
                ..self
            },
            false => self,
        }
    }

    /// Returns the number of copied elements.
    pub fn len(&self) -> usize {
        self.rows * self.run
    }
}

/// Adjacent elements of a target that no segment writes, and that are set to zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ZeroFill {
    /// Index of the target.
    pub target: usize,
    /// First element.
    pub at: usize,
    /// Number of elements.
    pub len: usize,
}

/// Copies between row-major tensors. Elements of a target that no segment writes are set to zero.
///
/// A plan is created once per unit, and used in every step. Executors rely on two invariants, which
/// [`new`](Self::new) establishes:
///
/// 1. Every segment is inside its source and its target.
/// 2. Each element of a target belongs to exactly one segment or gap.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CopyPlan {
    /// Shapes of the sources.
    pub(super) sources: Vec<Shape>,
    /// Shapes of the targets.
    pub(super) targets: Vec<Shape>,
    /// Copies, none of which is empty.
    pub(super) segments: Vec<StridedCopy>,
    /// Elements that are set to zero.
    pub(super) gaps: Vec<ZeroFill>,
}

#[cfg_attr(
    not(feature = "testing"),
    allow(dead_code, reason = "the benchmark reads them")
)]
impl CopyPlan {
    /// Creates a plan of these segments. Segments without elements are dropped.
    ///
    /// # Panics
    /// If a segment is outside its source or its target, or if two segments write the same element.
    /// The second is detected if elements of that target remain unwritten, and in debug builds
    /// always.
    pub fn new(sources: Vec<Shape>, targets: Vec<Shape>, segments: Vec<StridedCopy>) -> Self {
        let mut segments = segments;
        segments.retain_mut(|segment| {
            *segment = segment.merged();
            segment.len() > 0
        });
        let lens = |shapes: &[Shape]| shapes.iter().map(Shape::num_elements).collect::<Vec<_>>();
        let from = lens(&sources);
        let to = lens(&targets);
        for segment in &segments {
            let StridedCopy {
                source,
                target,
                rows,
                run,
                from_stride,
                to_stride,
                ..
            } = *segment;
            let from_end = segment.from + (rows - 1) * from_stride + run;
            let to_end = segment.to + (rows - 1) * to_stride + run;
            assert!(
                from_end <= from[source] && to_end <= to[target],
                "{segment:?} leaves its source or its target"
            );
        }
        let gaps = gaps(&to, &segments);
        Self {
            sources,
            targets,
            segments,
            gaps,
        }
    }

    /// Returns the shapes of the sources.
    pub fn sources(&self) -> &[Shape] {
        &self.sources
    }

    /// Returns the shapes of the targets.
    pub fn targets(&self) -> &[Shape] {
        &self.targets
    }

    /// Returns the number of copied elements.
    pub fn copied(&self) -> usize {
        self.segments.iter().map(StridedCopy::len).sum()
    }
}

/// Returns the elements that `segments` do not write, in targets of `lens` elements.
fn gaps(lens: &[usize], segments: &[StridedCopy]) -> Vec<ZeroFill> {
    let mut left = lens.to_vec();
    for segment in segments {
        let left = &mut left[segment.target];
        *left = left
            .checked_sub(segment.len())
            .unwrap_or_else(|| panic!("{segment:?} writes elements a second time"));
    }
    // If all elements of a target are counted and none is written twice, the target has no gaps.
    let open = |target: usize| left[target] > 0 || cfg!(debug_assertions);
    let written = segments
        .iter()
        .filter(|segment| open(segment.target))
        .flat_map(|segment| {
            let StridedCopy {
                target,
                to,
                rows,
                run,
                to_stride,
                ..
            } = *segment;
            (0..rows).map(move |row| (target, to + row * to_stride, run))
        });
    let ends = lens
        .iter()
        .enumerate()
        .filter(|(target, _)| open(*target))
        .map(|(target, len)| (target, *len, 0));
    let mut runs: Vec<_> = written.chain(ends).collect();
    runs.sort_unstable();
    let mut gaps = Vec::new();
    let mut end = (0, 0);
    for (target, at, run) in runs {
        let start = if end.0 == target { end.1 } else { 0 };
        assert!(
            start <= at,
            "element {at} of target {target} is written twice"
        );
        if start < at {
            gaps.push(ZeroFill {
                target,
                at: start,
                len: at - start,
            });
        }
        end = (target, at + run);
    }
    gaps
}
