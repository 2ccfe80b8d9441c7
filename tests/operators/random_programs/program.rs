//! [`Program`]: inputs and steps, written once and run on burn's tensors and on DTensors.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{FloatDType, Gradients, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::placement::Layout;

use super::profile::Profile;
use super::value::{Data, Value};

/// Names a value of a program: an input or a result.
pub type Id = usize;

/// An operator on values of one side: burn's tensors or DTensors.
pub type Apply = Arc<dyn Fn(Vec<Value>) -> Vec<Value> + Send + Sync>;

/// An input.
#[derive(Clone)]
pub struct Leaf {
    pub id: Id,
    pub data: Data,
    pub layout: Layout,
}

/// One operator applied.
#[derive(Clone)]
pub struct Step {
    pub operator: &'static str,
    /// Its place in the list of [operators](super::operators::all), if it was drawn from there.
    pub entry: Option<usize>,
    pub operands: Vec<Id>,
    pub results: Vec<Id>,
    pub plain: Apply,
    pub sharded: Apply,
    /// The expression, in names of `operands` and arguments.
    pub text: &'static str,
    pub names: Vec<&'static str>,
    pub arguments: Vec<(&'static str, String)>,
}

/// Inputs and steps.
#[derive(Clone)]
pub struct Program {
    pub seed: u64,
    pub mesh: Vec<usize>,
    pub profile: Profile,
    pub leaves: Vec<Leaf>,
    pub steps: Vec<Step>,
    /// How often forward and backward run on the same leaves.
    pub rounds: usize,
    /// Whether a value is moved into the last step that uses it, so that nothing shares it.
    pub moves: bool,
    /// Whether every result is compared where it is made, or only those that no step uses.
    pub watches: bool,
    /// Whether it is measured how deep in the graph each rank's part of every result lies.
    pub probes: bool,
}

impl Program {
    /// Results that no step uses, and inputs that none does.
    pub fn ends(&self) -> Vec<Id> {
        let used = |id: &Id| self.steps.iter().any(|step| step.operands.contains(id));
        self.steps
            .iter()
            .flat_map(|step| step.results.clone())
            .filter(|id| !used(id))
            .collect()
    }

    /// Drops inputs that no step uses.
    pub fn prune(&mut self) {
        let steps = &self.steps;
        self.leaves
            .retain(|leaf| steps.iter().any(|step| step.operands.contains(&leaf.id)));
    }

    /// Runs the steps on `leaves`, each by `apply`, and shows every step's results to `watch`.
    /// Gives the values at the [`ends`](Self::ends).
    pub fn run(
        &self,
        leaves: &[Value],
        apply: impl Fn(&Step, Vec<Value>) -> Vec<Value>,
        mut watch: impl FnMut(&Step, &[Value]) -> Result<()>,
    ) -> Result<Vec<(Id, Value)>> {
        let mut values: Vec<(Id, Value)> = self
            .leaves
            .iter()
            .zip(leaves)
            .map(|(leaf, value)| (leaf.id, value.share()))
            .collect();
        for (at, step) in self.steps.iter().enumerate() {
            let mut operands = Vec::new();
            for (nth, id) in step.operands.iter().enumerate() {
                let place = values
                    .iter()
                    .position(|(known, _)| known == id)
                    .expect("operands come before their uses");
                let again = step.operands[nth + 1..].contains(id)
                    || self.steps[at + 1..]
                        .iter()
                        .any(|later| later.operands.contains(id));
                let moved = self.moves && !again;
                operands.push(if moved {
                    values.swap_remove(place).1
                } else {
                    values[place].1.share()
                });
            }
            let results = apply(step, operands);
            watch(step, &results)?;
            values.extend(step.results.iter().copied().zip(results));
        }
        let ends = self.ends();
        values.retain(|(id, _)| ends.contains(id));
        values.sort_by_key(|(id, _)| *id);
        Ok(values)
    }

    /// Backward from all `ends`, each element with a weight of its own. `None` if none is tracked.
    pub fn backward(&self, ends: &[(Id, Value)]) -> Result<Option<Gradients>> {
        let mut loss: Option<Tensor<1>> = None;
        for (id, value) in ends {
            if let Some(row) = value.tracked()? {
                let term = weighed(*id, row, self.profile.is_exact());
                loss = Some(match loss {
                    Some(loss) => loss + term,
                    None => term,
                });
            }
        }
        Ok(loss.map(|loss| loss.backward()))
    }
}

/// The sum of the elements of `row`, each with a weight of its own.
pub fn weighed(id: Id, row: Tensor<1>, integers: bool) -> Tensor<1> {
    let weight = |at: usize| {
        let bits = (id * 31 + at + 1).wrapping_mul(0x9e37_79b9) >> 7 & 0xff;
        if integers {
            (1 + bits % 2) as f64
        } else {
            0.5 + bits as f64 / 256.0
        }
    };
    let weights: Vec<f64> = (0..row.shape().num_elements()).map(weight).collect();
    let weights = TensorData::new(weights, row.shape());
    let weights = Tensor::<1>::from_data(weights, (&row.device(), row.dtype()));
    (row * weights).sum().cast(FloatDType::F64)
}

/// As one would write it.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seed,
            mesh,
            profile,
            rounds,
            moves,
            watches,
            probes,
            ..
        } = self;
        writeln!(
            f,
            "// seed {seed}, mesh {mesh:?}, {:?} and {:?}; {rounds} rounds, moves: {moves}, watches: {watches}, probes: {probes}",
            profile.float, profile.int
        )?;
        for Leaf { id, data, layout } in &self.leaves {
            let Data { kind, shape, .. } = data;
            writeln!(
                f,
                "let v{id} = input::<{}, {kind:?}>({shape:?}, \"{layout}\");",
                shape.len()
            )?;
        }
        self.steps.iter().try_for_each(|step| writeln!(f, "{step}"))
    }
}

/// `let v7 = activation::softmax(v3, 1);`
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.results[..] {
            [result] => write!(f, "let v{result} = ")?,
            results => write!(
                f,
                "let [{}] = ",
                results
                    .iter()
                    .map(|id| format!("v{id}"))
                    .collect::<Vec<_>>()
                    .join(", ")
            )?,
        }
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let mut rest = self.text;
        while let Some(first) = rest.chars().next() {
            let len = if is_name(first) {
                rest.find(|c| !is_name(c)).unwrap_or(rest.len())
            } else {
                first.len_utf8()
            };
            let (token, after) = rest.split_at(len);
            rest = after;
            if let Some(at) = self.names.iter().position(|name| *name == token) {
                write!(f, "v{}", self.operands[at])?;
            } else if let Some((_, value)) = self.arguments.iter().find(|(name, _)| *name == token)
            {
                f.write_str(value)?;
            } else {
                f.write_str(token)?;
            }
        }
        write!(f, "; // {}", self.operator)
    }
}
