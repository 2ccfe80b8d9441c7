//! [`Wholes`]: what an all-gather returns, while the parts of other processes land in it.
//!
//! Of a rank that is alone in its process, what the others send can land where its result has it, and is not copied again:
//!
//! ```text
//! whole   | from rank 0 | own part | from rank 2 |
//! ```
//!
//! That is so where the part of every rank is in one piece there: cut along the first dimension, or behind dimensions of
//! one index.

use std::any::Any;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Device, TensorData};
use parking_lot::Mutex;

use super::payload::{Space, payload};
use crate::comm::TensorMeta;
use crate::comm::courier::Landing;
use crate::comm::engine::{self, TensorPrint};

/// Less is copied faster than its place is found.
pub(in crate::comm) const WORTH: usize = 64 << 10;

/// The wholes of one all-gather.
pub(in crate::comm) struct Wholes {
    prints: Arc<[TensorPrint]>,
    /// Where each rank's part begins in each whole, in bytes, and where the last one ends.
    edges: Vec<Vec<usize>>,
    /// Where each whole begins.
    starts: Vec<Start>,
    /// Until the result is taken.
    spaces: Mutex<Option<Vec<Space>>>,
}

struct Start(NonNull<MaybeUninit<u8>>);

// SAFETY: an address alone; whoever reads or writes there says why it may.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}

impl Wholes {
    /// Of tensors like these over `ranks` ranks; `None` if a part is in several pieces.
    pub fn of(prints: &Arc<[TensorPrint]>, ranks: usize) -> Option<Arc<Self>> {
        let edges = prints.iter().map(|print| edges(print, ranks)).collect::<Option<Vec<_>>>()?;
        let space = |print: &TensorPrint| Space::new(print.dtype.size(), print.shape.num_elements());
        let mut spaces: Vec<_> = prints.iter().map(space).collect();
        let start = |space: &mut Space| Start(NonNull::from(space.space()).cast());
        let starts = spaces.iter_mut().map(start).collect();
        Some(Arc::new(Self { prints: prints.clone(), edges, starts, spaces: Mutex::new(Some(spaces)) }))
    }

    /// Where the parts of `member` land, those with elements; `None` if they are not `parts`.
    pub fn regions(self: &Arc<Self>, member: usize, parts: &[TensorMeta]) -> Option<Vec<Box<dyn Landing>>> {
        let bytes = |part: &TensorMeta| part.shape.num_elements() * part.dtype.size();
        let fits = |(part, edges): (&TensorMeta, &Vec<usize>)| edges[member] + bytes(part) == edges[member + 1];
        if parts.len() != self.edges.len() || !parts.iter().zip(&self.edges).all(fits) {
            return None;
        }
        let region = |(start, edges): (&Start, &Vec<usize>)| -> Option<Box<dyn Landing>> {
            let len = edges[member + 1] - edges[member];
            // SAFETY: inside the whole.
            let at = unsafe { start.0.add(edges[member]) };
            (len > 0).then(|| Box::new(Region { at: Start(at), len, wholes: self.clone() }) as _)
        };
        Some(self.starts.iter().zip(&self.edges).filter_map(region).collect())
    }

    /// The wholes, on `device`, with what has not landed in them: the parts of these members.
    ///
    /// # Safety
    /// The parts of all other members have landed. Called once.
    pub unsafe fn joined<'a>(
        &self,
        parts: impl Iterator<Item = (usize, &'a [DispatchTensor])>,
        device: &Device,
    ) -> Vec<DispatchTensor> {
        for (member, parts) in parts {
            for ((part, edges), start) in parts.iter().zip(&self.edges).zip(&self.starts) {
                let part = payload(part);
                let elements = (*part).as_ref();
                assert_eq!(edges[member] + elements.len(), edges[member + 1], "what ranks have agreed on");
                // SAFETY: inside the whole, where only this member's part is.
                unsafe {
                    let to = start.0.as_ptr().cast::<u8>().add(edges[member]);
                    to.copy_from_nonoverlapping(elements.as_ptr(), elements.len());
                }
            }
        }
        let spaces = self.spaces.lock().take().expect("a result is taken once");
        let whole = |(print, space): (&TensorPrint, Space)| {
            // SAFETY: the parts of all members are written, which is all there is.
            let bytes = unsafe { space.filled() };
            engine::from_data(TensorData::from_bytes(bytes, print.shape.clone(), print.dtype), device)
        };
        self.prints.iter().zip(spaces).map(whole).collect()
    }
}

/// Where the parts of `ranks` ranks begin in a whole, in bytes, and where the last one ends; `None` if they are in several
/// pieces.
fn edges(print: &TensorPrint, ranks: usize) -> Option<Vec<usize>> {
    let cut = print.cut.as_ref()?;
    let (before, rest) = print.shape.split_at(cut.dim);
    let (len, inner) = rest.split_first()?;
    if before.iter().product::<usize>() != 1 || cut.lengths.as_ref().is_some_and(|lengths| lengths.len() != ranks) {
        return None;
    }
    let row = inner.iter().product::<usize>() * print.dtype.size();
    let ends = (0..ranks).map(|member| cut.of(*len).range(ranks, member).end * row);
    Some(std::iter::once(0).chain(ends).collect())
}

/// Where one part lands.
struct Region {
    at: Start,
    len: usize,
    wholes: Arc<Wholes>,
}

impl Landing for Region {
    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: inside the whole, which is not taken before all parts have landed; no other region is there.
        unsafe { std::slice::from_raw_parts_mut(self.at.0.as_ptr(), self.len) }
    }
}

/// The wholes that `landings` are regions of, if they are.
pub(in crate::comm) fn of_landings(landings: &[Box<dyn Landing>]) -> Option<Arc<Wholes>> {
    let first: &dyn Any = &**landings.first()?;
    first.downcast_ref::<Region>().map(|region| region.wholes.clone())
}

impl fmt::Debug for Wholes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wholes").field("edges", &self.edges).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Shape};

    use super::*;
    use crate::comm::engine::CutPrint;
    use crate::placement::Cut;

    fn edges_of<const D: usize>(shape: [usize; D], dim: usize, cut: &Cut) -> Option<Vec<usize>> {
        let cut = Some(CutPrint::new(dim, cut));
        edges(&TensorPrint { shape: Shape::from(shape), dtype: DType::F32, cut, to: None }, 3)
    }

    #[test]
    fn parts_in_one_piece_have_a_place() {
        assert_eq!(edges_of([7, 2], 0, &Cut::Chunks(7)), Some(vec![0, 24, 48, 56]));
        assert_eq!(edges_of([1, 1, 5], 2, &Cut::Lengths([3, 0, 2].into())), Some(vec![0, 12, 12, 20]));
        assert_eq!(edges_of([2, 6], 1, &Cut::Chunks(6)), None, "each part is in two pieces");
        assert_eq!(edges_of([5], 0, &Cut::Lengths([3, 2].into())), None, "lengths of two ranks");
    }

    #[test]
    fn parts_of_other_lengths_have_none() {
        let cut = Some(CutPrint::new(0, &Cut::Chunks(7)));
        let print = TensorPrint { shape: Shape::from([7, 2]), dtype: DType::F32, cut, to: None };
        let wholes = Wholes::of(&[print].into(), 3).unwrap();
        let part = |rows: usize| TensorMeta { shape: Shape::from([rows, 2]), dtype: DType::F32 };
        let lengths = |member: usize, parts: &[TensorMeta]| -> Option<Vec<usize>> {
            Some(wholes.regions(member, parts)?.iter_mut().map(|region| region.space().len()).collect())
        };
        assert_eq!(lengths(1, &[part(3)]), Some(vec![24]));
        assert_eq!(lengths(2, &[part(1)]), Some(vec![8]));
        assert_eq!([lengths(2, &[part(3)]), lengths(1, &[part(3), part(3)])], [None, None]);
    }
}
