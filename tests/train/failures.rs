//! Ranks that disagree, fail, or ask to stop: all ranks end in the same way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, DatasetError};
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;
use burn::train::metric::LossMetric;
use burn::train::{
    ClassificationOutput, InferenceStep, Interrupter, Learner, TrainOutput, TrainStep,
};
use burn_dtensor::prelude::*;
use burn_dtensor::train::{TrainError, supervised};

use super::support::{
    BATCH, Batch, Folder, Net, Row, Rows, loader, metrics, on_ranks, part, rows, train_on,
};

/// A training on two ranks with these loaders, and its error.
fn error_of(
    name: &str,
    loaders: impl Fn(usize) -> [Arc<dyn DataLoader<Batch>>; 2] + Sync,
) -> String {
    let folder = Folder::new(name);
    let trained = on_ranks(2, |mesh| {
        let [train, valid] = loaders(mesh.rank());
        let caught = Error::catch(|| {
            train_on(mesh, &folder, train, valid, |training| {
                training.num_epochs(2)
            })
            .map(drop)
        });
        // Every rank has the error, and can continue.
        mesh.world().barrier("after")?;
        Ok(caught.unwrap_err().to_string())
    });
    let texts = trained.unwrap();
    assert_eq!(texts[0], texts[1]);
    texts[0].clone()
}

fn own(count: usize, rank: usize) -> Arc<dyn DataLoader<Batch>> {
    loader(part(&rows(100, count, 0.2), rank, 2), BATCH / 2)
}

#[test]
fn other_numbers_of_training_batches_are_an_error_of_every_rank() {
    // Both have a batch's rows, rank 0 in two batches.
    let text = error_of("uneven", |rank| {
        let train = loader(
            part(&rows(100, 2 * BATCH, 0.2), rank, 2),
            (1 + rank) * BATCH / 2,
        );
        [train, own(BATCH, rank)]
    });
    assert_eq!(
        text,
        "in epoch 1, the training loaders of ranks [1] ended after 1 batches, those of ranks [0] did not. Give every \
         rank the same number of batches. The loaders report the same number of rows, so their batch sizes probably differ"
    );
}

#[test]
fn a_split_without_rows_on_a_rank_is_an_error_of_every_rank() {
    for split in ["train", "valid"] {
        let text = error_of("no-rows", |rank| {
            let rows = |of: &str| BATCH * (1 - rank * usize::from(of == split));
            [own(rows("train"), rank), own(rows("valid"), rank)]
        });
        let expected = format!(
            "the loaders of ranks [1] have no rows of the {split} split, those of other ranks do"
        );
        assert!(text.starts_with(&expected), "{text}");
    }
}

/// A data set whose row 8 cannot be read.
struct Broken(Vec<Row>);

impl Dataset<Row> for Broken {
    fn get(&self, index: usize) -> std::result::Result<Row, DatasetError> {
        match index {
            8 => Err(DatasetError::new(std::io::Error::other("the disk is gone"))),
            _ => Ok(self.0[index].clone()),
        }
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[test]
fn an_error_of_one_ranks_data_is_an_error_of_every_rank() {
    let text = error_of("broken", |rank| {
        let rows = part(&rows(100, 3 * BATCH, 0.2), rank, 2);
        let builder = DataLoaderBuilder::new(Rows).batch_size(BATCH / 2);
        let train = if rank == 1 {
            builder.build(Broken(rows))
        } else {
            loader(rows, BATCH / 2)
        };
        [train, own(BATCH, rank)]
    });
    let expected = "the training stopped because rank 1 failed: Dataset error: the disk is gone";
    assert_eq!(text, expected);
}

/// One row, which can be read once.
struct ReadOnce {
    row: Row,
    read: AtomicBool,
}

impl Dataset<Row> for ReadOnce {
    fn get(&self, _: usize) -> std::result::Result<Row, DatasetError> {
        match self.read.swap(true, Ordering::Relaxed) {
            true => Err(DatasetError::new(std::io::Error::other("the disk is gone"))),
            false => Ok(self.row.clone()),
        }
    }

    fn len(&self) -> usize {
        1
    }
}

#[test]
fn an_error_of_the_row_that_a_rank_validates_again_is_an_error_of_every_rank() {
    let text = error_of("again", |rank| {
        let row = rows(100, 1, 0.2).remove(0);
        let builder = DataLoaderBuilder::new(Rows).batch_size(BATCH / 2);
        let valid = match rank {
            1 => builder.build(ReadOnce {
                row,
                read: AtomicBool::new(false),
            }),
            _ => own(3 * BATCH, rank),
        };
        [own(BATCH, rank), valid]
    });
    assert_eq!(
        text,
        "the training stopped because rank 1 failed: Dataset error: the disk is gone"
    );
}

/// Steps that a rank has fetched a batch for, and the interrupter that it stops after two of them.
struct StopAt {
    rows: Vec<Row>,
    read: AtomicUsize,
    interrupter: Interrupter,
}

impl Dataset<Row> for StopAt {
    fn get(&self, index: usize) -> std::result::Result<Row, DatasetError> {
        if self.read.fetch_add(1, Ordering::Relaxed) == 3 * BATCH / 2 {
            self.interrupter.stop(Some("enough"));
        }
        Ok(self.rows[index].clone())
    }

    fn len(&self) -> usize {
        self.rows.len()
    }
}

#[test]
fn a_rank_that_is_interrupted_stops_all() {
    let folder = Folder::new("interrupted");
    let stopped = on_ranks(2, |mesh| {
        let interrupter = Interrupter::new();
        let rows = part(&rows(100, 6 * BATCH, 0.2), mesh.rank(), 2);
        let builder = DataLoaderBuilder::new(Rows).batch_size(BATCH / 2);
        let train = match mesh.rank() {
            1 => builder.build(StopAt {
                rows,
                read: AtomicUsize::new(0),
                interrupter: interrupter.clone(),
            }),
            _ => loader(rows, BATCH / 2),
        };
        let result = train_on(mesh, &folder, train, own(BATCH, mesh.rank()), |training| {
            training.num_epochs(2).with_interrupter(interrupter)
        })?;
        let reason = result
            .interrupted
            .and_then(|interruption| interruption.reason);
        Ok((
            reason,
            super::support::logged(&folder.rank(mesh.rank()), "train", 1, "Loss").len(),
        ))
    })
    .unwrap();
    // Three of the six batches, and the mean of them.
    assert_eq!(
        stopped,
        [
            (Some("rank 1: enough".into()), 4),
            (Some("enough".into()), 4)
        ]
    );
}

#[test]
fn a_model_that_is_not_distributed_is_refused() {
    let folder = Folder::new("replicas");
    let text = on_ranks(2, |mesh| {
        let training = metrics(supervised(mesh, &folder, own(BATCH, 0), own(BATCH, 0))?);
        let model = Net::new(&mesh.device().clone().autodiff());
        training.launch(Learner::new(
            model,
            SgdConfig::new().init(),
            ConstantLr::new(0.1),
        ));
        Ok(())
    });
    let text = text.unwrap_err().to_string();
    assert!(
        text.contains("is distributed over DeviceMesh(shard=2; ranks 0..2), so that its 2 ranks"),
        "{text}"
    );
}

/// Ranks along `dp` would train models of their own, on rows of their own.
#[test]
fn a_model_that_is_only_tensor_parallel_is_refused() {
    let folder = Folder::new("tensor-parallel");
    let trained = launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let own = || own(BATCH, 0);
        let training = metrics(supervised(&mesh.slice("dp")?, &folder, own(), own())?);
        let plan = Plan::new().with_style("up", Style::colwise());
        let model = Net::new(&mesh.device().clone().autodiff());
        training.launch(Learner::new(
            parallelize(model, &mesh.slice("tp")?, plan)?,
            SgdConfig::new().init(),
            ConstantLr::new(0.1),
        ));
        Ok(())
    });
    let text = trained.unwrap_err().to_string();
    assert!(
        text.contains("no parameter of the model is distributed over DeviceMesh(dp=2; ranks ["),
        "{text}"
    );
}

#[test]
fn a_model_without_autodiff_is_refused() {
    let folder = Folder::new("no-autodiff");
    let text = on_ranks(2, |mesh| {
        let training = metrics(supervised(mesh, &folder, own(BATCH, 0), own(BATCH, 0))?);
        let model = fully_shard(Net::new(mesh.device()), mesh, FullyShard::new())?;
        training.launch(Learner::new(
            model,
            SgdConfig::new().init(),
            ConstantLr::new(0.1),
        ));
        Ok(())
    });
    let text = text.unwrap_err().to_string();
    assert!(
        text.contains("the model is on a device without autodiff"),
        "{text}"
    );
}

/// A model whose output has two rows for each row of the batch, but one target.
#[derive(Module, Debug)]
struct Twice {
    net: Net,
}

impl Twice {
    fn output(&self, batch: Batch) -> ClassificationOutput {
        let output = InferenceStep::step(&self.net, batch);
        ClassificationOutput {
            output: Tensor::cat(vec![output.output.clone(), output.output], 0),
            ..output
        }
    }
}

impl TrainStep for Twice {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.output(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Twice {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.output(batch)
    }
}

#[test]
fn an_output_whose_tensors_have_other_lengths_is_refused() {
    let folder = Folder::new("lengths");
    let text = on_ranks(2, |mesh| {
        let training = supervised(
            mesh,
            &folder,
            own(BATCH, mesh.rank()),
            own(BATCH, mesh.rank()),
        )?;
        let model = fully_shard(
            Twice {
                net: Net::new(&mesh.device().clone().autodiff()),
            },
            mesh,
            FullyShard::new(),
        )?;
        let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.1));
        training
            .metrics((LossMetric::new(),))
            .with_application_logger(None)
            .launch(learner);
        Ok(())
    });
    let text = text.unwrap_err().to_string();
    let expected =
        "a tensor of the step's output has length 6 along dimension 0, but the batch has 12 rows";
    assert!(text.contains(expected), "{text}");
}

#[derive(Module, Debug)]
struct Experts {
    up: Param<Tensor<3>>,
}

/// A classifier with experts, of which each rank along `ep` has some.
#[derive(Module, Debug)]
struct Mixture {
    net: Net,
    experts: Experts,
}

impl TrainStep for Mixture {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        TrainStep::step(&self.net, batch)
    }
}

impl InferenceStep for Mixture {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        InferenceStep::step(&self.net, batch)
    }
}

/// Gradients of experts contain the losses of other ranks, so a rank's weight is not theirs.
#[test]
fn experts_with_other_numbers_of_rows_are_an_error_of_every_rank() {
    let folder = Folder::new("experts");
    launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2, 2], ["efsdp", "ep"])?;
        let by_expert = Plan::new().with_style("*", Style::placed(Placement::Shard(0)));
        let experts = Experts {
            up: Param::from_tensor(Tensor::ones([4, 2, 2], &device)),
        };
        let model = Mixture {
            net: Net::new(&device),
            experts: parallelize(experts, &mesh.slice("ep")?, by_expert)?,
        };
        let config = FullyShard::new().with_shard_dims(["efsdp", "ep"]);
        let model = fully_shard(model, &mesh, config)?;
        let own = |count| loader(rows(100, count, 0.2), BATCH);
        let train = own(BATCH + world.rank());
        let error = Error::catch(|| {
            let optim = SgdConfig::new().init();
            supervised(&mesh, &folder, train, own(BATCH))?
                .with_application_logger(None)
                .launch(Learner::new(model, optim, ConstantLr::new(0.1)));
            Ok(())
        });
        let error = error.unwrap_err();
        assert!(
            matches!(error, Error::Train(TrainError::UnevenExperts)),
            "{error}"
        );
        world.barrier("after")?;
        Ok(())
    })
    .unwrap();
}
