//! [`TrainingRanks`]: decisions that all ranks of a training take together.

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::train::Interrupter;
use itertools::Itertools;

use super::TrainError;
use crate::Result;
use crate::comm::{Call, Communicator, agree};
use crate::mesh::DeviceMesh;

/// State of a rank between two batches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    /// It has a further batch.
    Batch,
    /// It has none.
    End,
    /// Stopped by its interrupter.
    Stop,
    /// An error stopped it.
    Failed,
}

impl Status {
    const ALL: [Self; 4] = [Self::Batch, Self::End, Self::Stop, Self::Failed];
}

/// The ranks that take decisions together: all of the root mesh.
///
/// Every decision is one exchange of numbers, from which each rank reads the same answer.
pub(super) struct TrainingRanks {
    /// Global ranks, in the order of `comm`.
    ranks: Vec<usize>,
    /// True for the ranks that together have each row once.
    has_own_rows: Vec<bool>,
    comm: Communicator,
    interrupter: Interrupter,
}

/// Numbers of items of a split.
pub(super) struct SplitItems {
    /// Number of all ranks together.
    pub(super) total: usize,
    /// True if all ranks have the same number.
    pub(super) is_even: bool,
}

/// The next batch, as far as the ranks have one.
pub(super) struct Round {
    /// Global ranks that have a batch, and those that do not.
    has_batch: Vec<(usize, bool)>,
    /// Number of items that all ranks have processed together with this batch.
    processed: usize,
    /// Weight of this rank's gradients of this batch: the number of its items, divided by their mean
    /// over the ranks.
    pub(super) weight: f64,
    /// True if all ranks stop here, because an interrupter asked for it.
    pub(super) stopped: bool,
}

impl TrainingRanks {
    pub(super) fn new(mesh: &DeviceMesh, interrupter: &Interrupter) -> Result<Self> {
        let root = mesh.root();
        let ranks = root.ranks().to_vec();
        let has_own_rows = ranks
            .iter()
            .map(|rank| mesh.ranks().contains(rank))
            .collect();
        let comm = root.all()?;
        Ok(Self {
            ranks,
            has_own_rows,
            comm,
            interrupter: interrupter.clone(),
        })
    }

    /// Returns true on the rank that draws, and whose decisions count.
    pub(super) fn is_first(&self) -> bool {
        self.comm.group().rank() == 0
    }

    /// Exchanges the same count of numbers from each rank.
    fn exchange<const N: usize>(&self, own: [usize; N]) -> Result<Vec<[usize; N]>> {
        let all = self.comm.all_gather_numbers(Call::new("train"), &own)?;
        Ok(all
            .chunks_exact(N)
            .map(|of_rank| of_rank.try_into().expect("chunks of this length"))
            .collect())
    }

    /// Exchanges the numbers of items of a split.
    ///
    /// # Errors
    /// [`TrainError::NoRows`] if some ranks have none, and others do.
    pub(super) fn items(&self, split: &str, own: usize) -> Result<SplitItems> {
        let all = self.exchange([own])?.into_iter().flatten().collect_vec();
        let ranks = self.ranks.iter().zip(&all);
        let empty = ranks
            .filter(|(_, items)| **items == 0)
            .map(|(rank, _)| *rank)
            .collect_vec();
        if !empty.is_empty() && empty.len() < all.len() {
            let split = split.into();
            return Err(TrainError::NoRows { split, empty }.into());
        }
        Ok(SplitItems {
            is_even: all.iter().all_equal(),
            total: self.sum(all),
        })
    }

    /// Adds up what the ranks have, once for ranks that have the same rows.
    fn sum(&self, of_ranks: impl IntoIterator<Item = usize>) -> usize {
        self.has_own_rows
            .iter()
            .zip(of_ranks)
            .filter(|(own, _)| **own)
            .map(|(_, number)| number)
            .sum()
    }

    /// Returns the decision of the first rank.
    pub(super) fn decide(&self, own: bool) -> Result<bool> {
        Ok(self.exchange([usize::from(own)])?[0] == [1])
    }

    /// Returns true if all ranks stop here, because an interrupter asked for it.
    ///
    /// # Errors
    /// [`TrainError::Failed`] on every rank if a rank failed.
    pub(super) fn is_stopped(&self) -> Result<bool> {
        Ok(self.round(Status::End, 0, 0)?.stopped)
    }

    /// Exchanges what each rank does next. An interrupter that was asked to stop, or failed, comes
    /// first. `items` is the number of items in this rank's next batch, and `processed` the number up
    /// to and including it.
    fn round(&self, next: Status, items: usize, processed: usize) -> Result<Round> {
        let status = match (self.interrupter.error(), self.interrupter.should_stop()) {
            (Some(_), _) => Status::Failed,
            (None, true) => Status::Stop,
            (None, false) => next,
        };
        let all = self.exchange([status as usize, items, processed])?;
        let status = |number: usize| Status::ALL[number];
        for found in [Status::Failed, Status::Stop] {
            if let Some(at) = all.iter().position(|&[number, ..]| status(number) == found) {
                self.stop(found, at)?;
            }
        }
        let has_batch = self
            .ranks
            .iter()
            .zip(&all)
            .map(|(&rank, &[number, ..])| (rank, status(number)));
        Ok(Round {
            has_batch: has_batch
                .map(|(rank, status)| (rank, status == Status::Batch))
                .collect(),
            processed: self.sum(all.iter().map(|[.., processed]| *processed)),
            weight: self.weight(&all),
            stopped: all
                .iter()
                .any(|&[number, ..]| status(number) == Status::Stop),
        })
    }

    /// Returns the weight of this rank's gradients of a batch, of which each rank has some items or
    /// none. `all` are statuses and numbers of items. Ranks with a batch have equal weights if a
    /// loader does not count the items of one.
    fn weight(&self, all: &[[usize; 3]]) -> f64 {
        let has_batch = |number: usize| Status::ALL[number] == Status::Batch;
        let counts = all
            .iter()
            .all(|&[number, items, _]| !has_batch(number) || items > 0);
        let share = |&[number, items, _]: &[usize; 3]| match (has_batch(number), counts) {
            (false, _) => 0,
            (true, true) => items,
            (true, false) => 1,
        };
        let own = share(&all[self.comm.group().rank()]);
        let ranks = self.sum(self.ranks.iter().map(|_| 1));
        match self.sum(all.iter().map(share)) {
            0 => 1.0,
            all => (own * ranks) as f64 / all as f64,
        }
    }

    /// Takes over why the rank at position `at` stops.
    fn stop(&self, found: Status, at: usize) -> Result<()> {
        if found == Status::Failed {
            let own = self.interrupter.error().map_or(Ok(()), |error| {
                Err(TrainError::Failed {
                    rank: self.ranks[self.comm.group().rank()],
                    error: error.to_string(),
                })
            });
            agree(&self.comm, "train_failed", own)?;
            return Ok(());
        }
        let rank = self.ranks[at];
        let own = self.interrupter.get_message();
        let text = self
            .comm
            .broadcast_object(Call::new("train_stop"), Some(&own), at)?;
        if !self.interrupter.should_stop() {
            let reason = match text {
                None => format!("rank {rank} stopped"),
                Some(text) => format!("rank {rank}: {text}"),
            };
            self.interrupter.stop(Some(&reason));
        }
        Ok(())
    }
}

impl Round {
    /// Returns true if a rank has a batch.
    pub(super) fn any(&self) -> bool {
        self.has_batch.iter().any(|&(_, has)| has)
    }

    /// Returns true if some ranks have a batch and others do not, unless all stop.
    fn is_mixed(&self) -> bool {
        !self.stopped && self.any() && !self.has_batch.iter().all(|&(_, has)| has)
    }

    /// Returns an error if some ranks have a batch of the training set and others do not.
    pub(super) fn check_even(&self, epoch: usize, batches: usize) -> Result<()> {
        let (further, ended): (Vec<_>, Vec<_>) = self.has_batch.iter().partition(|(_, has)| *has);
        if further.is_empty() || ended.is_empty() {
            return Ok(());
        }
        let ranks = |of: Vec<(usize, bool)>| of.into_iter().map(|(rank, _)| rank).collect();
        Err(TrainError::UnevenBatches {
            epoch,
            batches,
            ended: ranks(ended),
            further: ranks(further),
        }
        .into())
    }

    /// Returns burn's progress after this batch, over all ranks.
    pub(super) fn progress(&self, total: usize) -> Progress {
        Progress::new(self.processed, total, Some("items".into()))
    }
}

/// Batches of one pass over a split. Each is fetched before the step of the one before it, so that
/// all ranks know which is the last.
pub(super) struct SplitBatches<'a, I> {
    iterator: Box<dyn DataLoaderIterator<I> + 'a>,
    /// Has the batch on which a rank computes whose batches have ended. It is not counted.
    filler: Option<&'a dyn DataLoader<I>>,
    next: Option<SplitBatch<I>>,
}

/// A batch, and whether it is one of the split.
pub(super) struct SplitBatch<I> {
    pub(super) batch: I,
    pub(super) is_counted: bool,
}

impl<'a, I> SplitBatches<'a, I> {
    pub(super) fn new(
        loader: &'a dyn DataLoader<I>,
        filler: Option<&'a dyn DataLoader<I>>,
    ) -> Self {
        Self {
            iterator: loader.iter(),
            filler,
            next: None,
        }
    }

    /// Fetches the next batch, and tells the other ranks.
    pub(super) fn fetch(&mut self, ranks: &TrainingRanks) -> Result<Round> {
        let before = self.iterator.progress().items_processed;
        let batch = or_failed(ranks, self.iterator.next());
        let processed = self.iterator.progress().items_processed;
        let next = if batch.is_some() {
            Status::Batch
        } else {
            Status::End
        };
        self.next = batch.map(|batch| SplitBatch {
            batch,
            is_counted: true,
        });
        let items = processed.saturating_sub(before);
        let mut round = ranks.round(next, items, processed)?;
        if let Some(filler) = self.filler
            && round.is_mixed()
        {
            if self.next.is_none() {
                // The first pass of a loader that resumes may begin after its row.
                let batch = filler.iter().next().or_else(|| filler.iter().next());
                let batch = or_failed(ranks, batch);
                self.next = batch.map(|batch| SplitBatch {
                    batch,
                    is_counted: false,
                });
            }
            // Whether every rank that has ended could read its filler.
            round.stopped |= ranks.is_stopped()?;
        }
        Ok(round)
    }

    /// Returns the batch that was fetched, if this rank has one.
    pub(super) fn take(&mut self) -> Option<SplitBatch<I>> {
        self.next.take()
    }
}

/// Returns a batch that was read. An error ends the training at the next exchange.
fn or_failed<I>(
    ranks: &TrainingRanks,
    batch: Option<std::result::Result<I, DatasetError>>,
) -> Option<I> {
    batch.transpose().unwrap_or_else(|error| {
        ranks.interrupter.fail(error);
        None
    })
}
