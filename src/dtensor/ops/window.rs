//! [`Window`]: an operator that moves a window along a dimension, or the transposed operator that spreads elements
//! over windows.

use std::ops::Range;

use super::halo::Reach;

/// A window along one spatial dimension. Its number of elements (`kernel`) is an argument of the
/// methods, because that of a convolution follows from the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Window {
    pub(super) stride: usize,
    /// Padding before and behind.
    pub(super) padding: (usize, usize),
    pub(super) dilation: usize,
    /// Elements that a transposed convolution adds behind its output.
    pub(super) padding_out: usize,
}

impl Window {
    /// Returns the distance from the first element to behind the last.
    fn extent(self, kernel: usize) -> Option<usize> {
        Some(self.dilation * kernel.checked_sub(1)? + 1)
    }

    /// Returns how many windows fit into `len` padded elements. With `ceil`, a window that begins
    /// inside and ends beyond them counts too.
    pub(super) fn count(self, len: usize, kernel: usize, ceil: bool) -> Option<usize> {
        let padded = len + self.padding.0 + self.padding.1 + if ceil { self.stride - 1 } else { 0 };
        let count = padded.checked_sub(self.extent(kernel)?)? / self.stride + 1;
        // In ceil mode the last window must start before the padding behind.
        let beyond = ceil && count > 1 && (count - 1) * self.stride >= len + self.padding.0;
        Some(count - usize::from(beyond))
    }

    /// Returns the output length of the transposed operator for `len` elements.
    pub(super) fn spread(self, len: usize, kernel: usize) -> Option<usize> {
        let full = len.checked_sub(1)? * self.stride + self.extent(kernel)? + self.padding_out;
        full.checked_sub(self.padding.0 + self.padding.1)
    }

    /// Returns the elements, out of `len`, that the windows `output` (at least one) read.
    pub(super) fn reach(self, kernel: usize, len: usize, output: Range<usize>) -> Reach {
        let start = |at: usize| (at * self.stride) as isize - self.padding.0 as isize;
        let extent = self.extent(kernel).unwrap_or(0) as isize;
        let input = start(output.start)..start(output.end - 1) + extent;
        let is_read = |element: usize| {
            let starts = (0..kernel)
                .filter_map(|at| (element + self.padding.0).checked_sub(at * self.dilation));
            starts
                .into_iter()
                .any(|start| start % self.stride == 0 && output.contains(&(start / self.stride)))
        };
        let needs = trimmed(&input, len, is_read);
        Reach {
            input,
            needs,
            made: signed(&output),
        }
    }

    /// Returns how many of the `len` elements window `at` covers. With `padded`, their padding
    /// counts too.
    pub(super) fn counted(self, len: usize, kernel: usize, at: usize, padded: bool) -> usize {
        let start = at * self.stride;
        let all = if padded {
            0..len + self.padding.0 + self.padding.1
        } else {
            self.padding.0..self.padding.0 + len
        };
        (start + kernel)
            .min(all.end)
            .saturating_sub(start.max(all.start))
    }

    /// Returns the elements, out of `len`, that are spread over the elements `output` (at least
    /// one).
    ///
    /// Element `i` of the input is spread over the output from `i * stride - padding` on, as far as
    /// the window extends. The windows of the first and the last element that is read may extend
    /// beyond `output`.
    pub(super) fn reach_spread(self, kernel: usize, len: usize, output: Range<usize>) -> Reach {
        let [stride, padding, extent] = [
            self.stride,
            self.padding.0,
            self.extent(kernel).unwrap_or(0),
        ];
        let is_read = |element: usize| {
            let ends = (0..kernel)
                .filter_map(|at| (element * stride + at * self.dilation).checked_sub(padding));
            ends.into_iter().any(|end| output.contains(&end))
        };
        let [stride, padding, extent] = [stride, padding, extent].map(|len| len as isize);
        let [first, last] = [output.start, output.end - 1].map(|at| at as isize + padding);
        // The first element that reaches `first`. If none does, because `first` is between two
        // windows, the one before it.
        let start = (first - extent + stride)
            .div_euclid(stride)
            .min(first.div_euclid(stride));
        let end = last.div_euclid(stride) + 1;
        let needs = trimmed(&(start..end), len, is_read);
        let made = start * stride - padding..(end - 1) * stride - padding + extent.max(stride);
        Reach {
            input: start..end,
            needs,
            made,
        }
    }

    /// Returns how many elements a transposed convolution must add behind those that it spreads, to
    /// make the output of [`reach_spread`](Self::reach_spread).
    pub(super) fn behind(self, kernel: usize) -> usize {
        self.stride.saturating_sub(self.extent(kernel).unwrap_or(0))
    }
}

/// Returns the interval from the first to the last element in `input` that is read, out of `len`.
fn trimmed(input: &Range<isize>, len: usize, is_read: impl Fn(usize) -> bool) -> Range<usize> {
    let inside =
        input.start.clamp(0, len as isize) as usize..input.end.clamp(0, len as isize) as usize;
    let first = inside.clone().find(|&element| is_read(element));
    let last = inside.rev().find(|&element| is_read(element));
    first
        .zip(last)
        .map_or(0..0, |(first, last)| first..last + 1)
}

fn signed(range: &Range<usize>) -> Range<isize> {
    range.start as isize..range.end as isize
}

#[cfg(test)]
mod tests {
    use itertools::{Itertools, iproduct};

    use super::*;

    fn windows() -> impl Iterator<Item = (Window, usize)> {
        iproduct!(1..=3, 0..=2, 1..=2, 1..=4).map(|(stride, padding, dilation, kernel)| {
            (
                Window {
                    stride,
                    padding: (padding, padding),
                    dilation,
                    padding_out: 0,
                },
                kernel,
            )
        })
    }

    const LEN: usize = 7;

    fn between(read: &[isize]) -> Range<usize> {
        let inside = read
            .iter()
            .copied()
            .filter(|read| (0..LEN as isize).contains(read));
        inside
            .minmax()
            .into_option()
            .map_or(0..0, |(first, last)| first as usize..last as usize + 1)
    }

    /// By definition, window `o` reads `o * stride - padding + k * dilation`.
    #[test]
    fn windows_reach_from_the_first_element_that_they_read_to_the_last() {
        for ((window, kernel), start, len) in iproduct!(windows(), 0..5, 1..4) {
            let read = iproduct!(start..start + len, 0..kernel);
            let read = read.map(|(o, k)| {
                (o * window.stride + k * window.dilation) as isize - window.padding.0 as isize
            });
            let read: Vec<isize> = read.collect();
            let reach = window.reach(kernel, LEN, start..start + len);
            assert_eq!(
                reach.input,
                *read.iter().min().unwrap()..read.iter().max().unwrap() + 1
            );
            assert_eq!(reach.needs, between(&read));
            assert_eq!(reach.made, start as isize..(start + len) as isize);
        }
    }

    #[test]
    fn a_window_covers_elements_and_perhaps_padding() {
        let window = Window {
            stride: 2,
            padding: (1, 2),
            dilation: 1,
            padding_out: 0,
        };
        // Windows over _ 0 1 2 3 _ _ that start at positions 0, 2, 4 and 6.
        let counted = |padded| {
            (0..4)
                .map(|at| window.counted(4, 3, at, padded))
                .collect::<Vec<_>>()
        };
        assert_eq!(counted(false), [2, 3, 1, 0]);
        assert_eq!(counted(true), [3, 3, 3, 1]);
    }

    /// By definition, element `i` is spread to `i * stride - padding + k * dilation`.
    #[test]
    fn what_is_spread_covers_the_output_and_no_element_of_it_comes_from_elsewhere() {
        for ((window, kernel), start, len) in iproduct!(windows(), 0..9, 1..4) {
            let reach = window.reach_spread(kernel, LEN, start..start + len);
            let at = |i: isize, k: usize| {
                i * window.stride as isize + (k * window.dilation) as isize
                    - window.padding.0 as isize
            };
            let output = start as isize..(start + len) as isize;
            let sources = (-20..20).filter(|&i| (0..kernel).any(|k| output.contains(&at(i, k))));
            let sources: Vec<isize> = sources.collect();
            assert!(
                sources.iter().all(|source| reach.input.contains(source)),
                "{window:?} {kernel} {output:?}"
            );
            assert_eq!(reach.needs, between(&sources));
            let first = reach.input.start;
            let last = reach.input.end - 1;
            let end = at(last, kernel - 1) + 1 + window.behind(kernel) as isize;
            assert_eq!(reach.made, at(first, 0)..end);
            assert!(
                reach.made.start <= output.start && output.end <= reach.made.end,
                "{window:?} {kernel} {output:?}"
            );
        }
    }
}
