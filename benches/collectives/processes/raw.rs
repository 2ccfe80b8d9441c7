//! The same exchanges by calls of MPI alone.

use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::Instant;

use mpi::collective::SystemOperation;
use mpi::request;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;

use super::{Collective, Raw, Sample, Way, rounds};
use crate::{SIZES, repeats};

/// Prints the samples of the collectives whose name has `only` in it.
pub fn measure(only: &str) {
    let universe = mpi::initialize().expect("nobody else in the process has initialized MPI");
    let world = universe.world();
    for collective in Collective::named(only) {
        for bytes in SIZES {
            let case = Case::new(collective, bytes, &world);
            let more = matches!(collective, Collective::AllGather | Collective::AllToAll)
                .then_some(Raw::Blocking);
            for raw in more.into_iter().chain(collective.raw()) {
                let mut into = space(case.length);
                case.sample(Way::Raw(raw), || case.call(raw, &mut into));
            }
            for raw in collective.raw() {
                case.sample(Way::Fresh(raw), || case.call(raw, &mut space(case.length)));
            }
        }
    }
}

/// Memory for one element, which MPI writes.
#[repr(transparent)]
struct Slot(MaybeUninit<f32>);

// SAFETY: it is laid out as an f32, and MPI only writes it.
unsafe impl Equivalence for Slot {
    type Out = <f32 as Equivalence>::Out;

    fn equivalent_datatype() -> Self::Out {
        f32::equivalent_datatype()
    }
}

/// New memory.
fn space(length: usize) -> Vec<Slot> {
    (0..length).map(|_| Slot(MaybeUninit::uninit())).collect()
}

fn copy(from: &[f32], into: &mut [Slot]) {
    // SAFETY: a slot is nothing but what it has.
    let into = unsafe { &mut *(into as *mut [Slot] as *mut [MaybeUninit<f32>]) };
    into.write_copy_of_slice(from);
}

/// One collective at one size.
struct Case<'w> {
    world: &'w SimpleCommunicator,
    collective: Collective,
    bytes: usize,
    from: Vec<f32>,
    /// Of the result.
    length: usize,
}

impl<'w> Case<'w> {
    fn new(collective: Collective, bytes: usize, world: &'w SimpleCommunicator) -> Self {
        let ranks = world.size() as usize;
        let part = bytes / size_of::<f32>() / ranks;
        let (given, length) = match collective {
            Collective::AllGather => (part, part * ranks),
            Collective::AllToAll | Collective::AllReduce => (part * ranks, part * ranks),
            Collective::ReduceScatter => (part * ranks, part),
        };
        Self {
            world,
            collective,
            bytes,
            from: vec![1.0; given],
            length,
        }
    }

    fn sample(&self, way: Way, mut call: impl FnMut()) {
        let (repeats, world) = (repeats(self.bytes), self.world);
        (0..repeats.max(2)).for_each(|_| call());
        let round = || {
            world.barrier();
            let start = Instant::now();
            (0..repeats).for_each(|_| call());
            start.elapsed().as_secs_f64() / repeats as f64
        };
        let own: Vec<f64> = std::iter::repeat_with(round)
            .take(rounds(self.bytes, repeats))
            .collect();
        let mut seconds = vec![0.0; own.len()];
        world.all_reduce_into(&own[..], &mut seconds[..], SystemOperation::max());
        if world.rank() == 0 {
            Sample {
                collective: self.collective,
                bytes: self.bytes,
                way,
                seconds,
            }
            .print();
        }
    }

    fn call(&self, raw: Raw, into: &mut [Slot]) {
        let (world, from) = (self.world, &self.from[..]);
        let sum = SystemOperation::sum;
        match (raw, self.collective) {
            (Raw::Blocking, Collective::AllGather) => world.all_gather_into(from, into),
            (Raw::Blocking, Collective::AllToAll) => world.all_to_all_into(from, into),
            (Raw::Blocking, Collective::AllReduce) => world.all_reduce_into(from, into, sum()),
            (Raw::Blocking, Collective::ReduceScatter) => {
                world.reduce_scatter_block_into(from, into, sum())
            }
            (Raw::Immediate, collective) => request::scope(|scope| {
                let request = match collective {
                    Collective::AllGather => world.immediate_all_gather_into(scope, from, into),
                    Collective::AllToAll => world.immediate_all_to_all_into(scope, from, into),
                    Collective::AllReduce => {
                        world.immediate_all_reduce_into(scope, from, into, sum())
                    }
                    Collective::ReduceScatter => {
                        world.immediate_reduce_scatter_block_into(scope, from, into, sum())
                    }
                };
                request.wait_without_status();
            }),
            (Raw::Exchange, _) => self.exchange(into),
        }
        black_box(into);
    }

    /// Gets a part from every process.
    fn exchange(&self, into: &mut [Slot]) {
        let (world, here) = (self.world, self.world.rank() as usize);
        let part = into.len() / world.size() as usize;
        let given = |rank: usize| match self.collective {
            Collective::AllGather => &self.from[..],
            _ => &self.from[rank * part..][..part],
        };
        request::scope(|scope| {
            let (mut own, mut receives, mut sends) = (None, Vec::new(), Vec::new());
            for (rank, space) in into.chunks_exact_mut(part).enumerate() {
                if rank == here {
                    own = Some(space);
                } else {
                    let process = world.process_at_rank(rank as i32);
                    receives.push(process.immediate_receive_into(scope, space));
                    sends.push(process.immediate_send(scope, given(rank)));
                }
            }
            copy(given(here), own.expect("there is a part for this process"));
            sends
                .into_iter()
                .for_each(|request| request.wait_without_status());
            receives
                .into_iter()
                .for_each(|request| request.wait_without_status());
        });
    }
}
