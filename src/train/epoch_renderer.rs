//! [`EpochRenderer`]: a renderer that prints one line for each epoch.

use std::collections::HashMap;
use std::error::Error;

use burn::train::LearnerSummary;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricAttributes, MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use itertools::Itertools;

use crate::mesh::DeviceMesh;

/// A renderer that prints one line for each epoch, with the values of its numeric metrics, and at
/// the end the summary. Only the first rank prints.
///
/// ```text
/// epoch 1/20: train Accuracy 46.1000 %, Loss 1.1807; valid Accuracy 61.9512 %, Loss 0.9313
/// ```
///
/// burn's own renderer draws a dashboard if the program has burn's feature `tui` and its output is a
/// terminal. Otherwise it prints a line for each step. Pass this one instead, on all ranks:
///
/// ```
/// # use std::sync::Arc;
/// # use burn::data::dataloader::DataLoader;
/// # use burn::train::{LearnerModel, InferenceStep, TrainStep, SupervisedTraining};
/// # use burn_dtensor::prelude::*;
/// use burn_dtensor::train::{EpochRenderer, GatherOutput, supervised};
///
/// # fn configure<M: LearnerModel>(
/// #     mesh: &DeviceMesh,
/// #     train: Arc<dyn DataLoader<<M as TrainStep>::Input>>,
/// #     valid: Arc<dyn DataLoader<<M as InferenceStep>::Input>>,
/// # ) -> Result<SupervisedTraining<M>>
/// # where
/// #     <M as TrainStep>::Output: GatherOutput,
/// #     <M as InferenceStep>::Output: GatherOutput,
/// # {
/// let training = supervised(mesh, "runs/classifier", train, valid)?.renderer(Box::new(EpochRenderer::new(mesh)));
/// # Ok(training)
/// # }
/// ```
#[derive(Debug)]
pub struct EpochRenderer {
    /// True if this rank prints.
    prints: bool,
    /// Number of epochs of the training.
    epochs: usize,
    metrics: Vec<MetricDefinition>,
    /// Last values of this epoch.
    train: HashMap<MetricId, f64>,
    valid: HashMap<MetricId, f64>,
}

impl EpochRenderer {
    /// Creates the renderer of a [`supervised`](super::supervised) training on `mesh`. The first
    /// rank of the mesh's [root](DeviceMesh::root) prints. Local: no communication.
    pub fn new(mesh: &DeviceMesh) -> Self {
        Self::printing(mesh.root().ranks()[0] == mesh.rank())
    }

    fn printing(prints: bool) -> Self {
        Self {
            prints,
            epochs: 0,
            metrics: Vec::new(),
            train: HashMap::new(),
            valid: HashMap::new(),
        }
    }

    fn line(&self, epoch: usize) -> String {
        let splits = [
            self.values("train", &self.train),
            self.values("valid", &self.valid),
        ];
        format!(
            "epoch {epoch}/{}: {}",
            self.epochs,
            splits.iter().flatten().join("; ")
        )
    }

    /// Returns the values of a split, in the order in which the metrics were registered; `None` if
    /// there are none.
    fn values(&self, split: &str, values: &HashMap<MetricId, f64>) -> Option<String> {
        let known = self.metrics.iter().filter_map(|metric| {
            let value = number(*values.get(&metric.metric_id)?);
            let unit = match &metric.attributes {
                MetricAttributes::Numeric(attributes) => attributes.unit.as_deref(),
                MetricAttributes::None => None,
            };
            let unit = unit.map_or_else(String::new, |unit| format!(" {unit}"));
            Some(format!("{} {value}{unit}", metric.name))
        });
        let listed = known.collect_vec();
        (!listed.is_empty()).then(|| format!("{split} {}", listed.join(", ")))
    }

    fn print_summary(&self, summary: Option<LearnerSummary>) {
        if let Some(summary) = summary.filter(|_| self.prints) {
            println!("{summary}");
        }
    }
}

/// Records the value of a numeric metric. The last one of an epoch is that of all its batches.
fn record(values: &mut HashMap<MetricId, f64>, state: MetricState) {
    if let MetricState::Numeric(entry, Some(value)) = state {
        values.insert(entry.metric_id, value.current());
    }
}

fn number(value: f64) -> String {
    if value == 0.0 || value.abs() >= 1e-3 {
        format!("{value:.4}")
    } else {
        format!("{value:.4e}")
    }
}

impl MetricsRendererTraining for EpochRenderer {
    fn update_train(&mut self, state: MetricState) {
        record(&mut self.train, state);
    }

    fn update_valid(&mut self, state: MetricState) {
        record(&mut self.valid, state);
    }

    fn on_train_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        self.print_summary(summary);
        Ok(())
    }
}

impl MetricsRendererEvaluation for EpochRenderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn on_test_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        self.print_summary(summary);
        Ok(())
    }
}

impl TrainingProgressLogger for EpochRenderer {
    fn start(&mut self, total_epochs: usize, _: usize, _: Option<usize>, _: Option<&str>) {
        self.epochs = total_epochs;
    }

    fn update_epoch(&mut self, epoch: usize) {
        if self.prints {
            println!("{}", self.line(epoch));
        }
        self.train.clear();
        self.valid.clear();
    }

    fn start_split(&mut self, _: &str, _: usize) {}

    fn update_split(&mut self, _: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for EpochRenderer {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, _: &str, _: usize) {}

    fn update_test_progress(&mut self, _: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for EpochRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.metrics.push(definition);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::train::metric::{MetricEntry, NumericAttributes, NumericEntry, SerializedEntry};

    use super::*;

    fn definition(name: &str, unit: Option<&str>) -> MetricDefinition {
        let name = Arc::new(name.to_owned());
        let attributes = NumericAttributes {
            unit: unit.map(String::from),
            higher_is_better: true,
        };
        MetricDefinition {
            metric_id: MetricId::new(name.clone()),
            name,
            description: None,
            attributes: attributes.into(),
        }
    }

    fn state(name: &str, value: Option<NumericEntry>) -> MetricState {
        let id = MetricId::new(Arc::new(name.to_owned()));
        let text = SerializedEntry::new(String::new(), String::new());
        MetricState::Numeric(MetricEntry::new(id, text), value)
    }

    #[test]
    fn an_epoch_is_one_line_with_the_last_value_of_each_metric() {
        let mut renderer = EpochRenderer::printing(false);
        renderer.register_metric(definition("Loss", None));
        renderer.register_metric(definition("Accuracy", Some("%")));
        renderer.start(20, 1, None, None);
        // A metric of the batch, of which the epoch's follows, and one that has no value yet.
        let of_batch = NumericEntry::Aggregated {
            aggregated_value: 9.0,
            count: 3,
        };
        renderer.update_train(state("Accuracy", Some(NumericEntry::Final(46.1))));
        renderer.update_train(state("Loss", Some(of_batch)));
        renderer.update_train(state("Loss", Some(NumericEntry::Final(1.18071))));
        assert_eq!(
            renderer.line(1),
            "epoch 1/20: train Loss 1.1807, Accuracy 46.1000 %"
        );
        renderer.update_valid(state("Loss", Some(NumericEntry::Final(0.00012345))));
        renderer.update_valid(state("Accuracy", None));
        assert_eq!(
            renderer.line(1),
            "epoch 1/20: train Loss 1.1807, Accuracy 46.1000 %; valid Loss 1.2345e-4"
        );
        // The next epoch has its own values.
        renderer.update_epoch(1);
        renderer.update_valid(state("Loss", Some(NumericEntry::Final(0.0))));
        assert_eq!(renderer.line(2), "epoch 2/20: valid Loss 0.0000");
    }
}
