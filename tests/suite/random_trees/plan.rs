//! [`Plan`]: a tree of modules, how it is sharded, and how ranks use it. No tensors.

use burn::tensor::DType;
use burn_dtensor::fsdp::{
    FullyShard, MixedPrecisionPolicy, OffloadPolicy, ParamInfo, ReshardAfterForward,
};
use burn_dtensor::parallel::{self, Style};
use burn_dtensor::placement::Placement;
use burn_dtensor::replicate::DataParallel;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::choices::{Backwards, Kept, Mode, Precision, Scaling, Times, Waits};
use super::node::{Node, Run, Split, Used};

/// Everything that is drawn about a run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    /// The data-parallel ranks.
    pub mesh: Vec<usize>,
    /// The number of ranks that compute together what one data-parallel rank computes.
    pub tensor_parallel: usize,
    pub reshard: ReshardAfterForward,
    /// The units that stay gathered after backward, in each step.
    pub kept: Vec<Kept>,
    pub checkpointing: bool,
    pub adam: bool,
    pub steps: usize,
    /// Backwards of a step, of which the last reduces what all have added up.
    pub batches_a_step: usize,
    /// The place where gradients of all but the last of them wait.
    pub waits: Waits,
    /// Samples of each rank.
    pub batches: Vec<usize>,
    /// The net's own forward is a unit's scope.
    pub scoped: bool,
    /// The table of embeddings is a unit of its own.
    pub table_unit: bool,
    /// The head reads the table of embeddings once more.
    pub tied: bool,
    /// Where what the tree is given depends on the table.
    pub given: Used,
    /// The first two of the tree's children that are units are one.
    pub grouped: bool,
    /// Every rank holds biases whole.
    pub full_biases: bool,
    /// Every rank holds the table of embeddings whole.
    pub full_table: bool,
    /// Shards are in host memory.
    pub offloaded: bool,
    /// When forwards are made that no backward follows, and how.
    pub evaluated: Times,
    pub mode: Mode,
    /// When the program reshards the model.
    pub resharded: Times,
    /// Units are unsharded before each step.
    pub unshards: bool,
    /// The model is gathered on rank 0 before the first forward.
    pub exports: bool,
    pub scaling: Scaling,
    pub precision: Precision,
    /// The number of models of this plan, which differ in their values and batches.
    pub models: usize,
    pub backwards: Backwards,
    /// The model is replicated in place of sharded, in buckets of these bytes.
    pub buckets: Option<[usize; 2]>,
    /// This child of the tree, a unit, is replicated, or sharded in a model that is replicated.
    pub nested: Option<usize>,
    pub tree: Node,
}

impl Plan {
    pub fn draw(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mesh = [&[2][..], &[2], &[3], &[4], &[2, 2]][rng.random_range(0..5)].to_vec();
        let ranks = mesh.iter().product();
        let uneven = rng.random_bool(0.4);
        let batches = (0..ranks)
            .map(|_| if uneven { rng.random_range(1..=3) } else { 2 })
            .collect();
        let few = if mesh == [4] {
            ReshardAfterForward::Ranks(2)
        } else {
            ReshardAfterForward::Always
        };
        let reshard = [
            ReshardAfterForward::Always,
            ReshardAfterForward::Never,
            ReshardAfterForward::Auto,
            few,
        ];
        let scoped = rng.random_bool(0.6);
        let mut size = 0;
        let tree = Node::draw(&mut rng, ranks, scoped, 0, &mut size);
        let given = match rng.random_range(0..6) {
            // Outside any unit ranks are alike.
            0 if scoped => Used::NotOn(rng.random_range(0..ranks)),
            1 => Used::Nowhere,
            _ => Used::Everywhere,
        };
        let accumulates = rng.random_bool(0.4);
        let tensor_parallel = match rng.random_bool(0.2) {
            true if ranks == 2 => rng.random_range(2..=3),
            true => 2,
            false => 1,
        };
        let precision = if tensor_parallel == 1 {
            Precision::draw(&mut rng)
        } else {
            Precision::Double
        };
        // Of later steps, and of quotients of gradients, half precision has no bound that is of
        // use.
        let steps = if precision == Precision::Double {
            rng.random_range(2..=3)
        } else {
            1
        };
        let mut plan = Self {
            seed,
            reshard: reshard[rng.random_range(0..4)],
            kept: Kept::draw(&mut rng, steps),
            checkpointing: rng.random_bool(0.3),
            adam: precision == Precision::Double && rng.random_bool(0.5),
            steps,
            batches_a_step: if accumulates {
                rng.random_range(2..=3)
            } else {
                1
            },
            waits: Waits::draw(&mut rng, mesh.len() > 1),
            grouped: scoped && rng.random_bool(0.5),
            batches,
            scoped,
            table_unit: rng.random_bool(0.5),
            tied: rng.random_bool(0.3),
            given,
            full_biases: rng.random_bool(0.3),
            full_table: rng.random_bool(0.1),
            offloaded: rng.random_bool(0.2),
            evaluated: Times::draw(&mut rng),
            mode: Mode::Training,
            resharded: Times::NEVER,
            unshards: false,
            exports: false,
            scaling: Scaling::draw(&mut rng, precision),
            precision,
            models: if rng.random_bool(0.15) {
                rng.random_range(2..=3)
            } else {
                1
            },
            backwards: [Backwards::Joint, Backwards::InOrder, Backwards::Reversed]
                [rng.random_range(0..3)],
            buckets: None,
            nested: None,
            tensor_parallel,
            tree,
            mesh,
        };
        plan.draw_nodes(&mut rng);
        plan.draw_calls(&mut rng);
        plan.draw_replicated(&mut rng);
        if !plan.is_sound() {
            plan.given = Used::Everywhere;
        }
        plan
    }

    /// Draws what some plans' nodes have, and others' have not.
    fn draw_nodes(&mut self, rng: &mut StdRng) {
        if rng.random_bool(0.3) {
            self.tree
                .change_all(&mut |node| node.narrow = rng.random_bool(0.4));
        }
        if rng.random_bool(0.3) {
            self.tree
                .change_all(&mut |node| node.full = rng.random_bool(0.4));
        }
        if rng.random_bool(0.3) {
            let batches = self.steps * self.batches_a_step;
            self.tree.change_all(&mut |node| {
                if rng.random_bool(0.5) {
                    node.left_out = (0..batches).filter(|_| rng.random_bool(0.5)).collect();
                }
            });
        }
        if self.tensor_parallel > 1 {
            self.tree.change_all(&mut |node| {
                node.local = rng.random_bool(0.15);
                node.split = match rng.random_range(0..5) {
                    0 => Split::None,
                    1 => Split::Colwise,
                    2 => Split::Rowwise,
                    _ => Split::Through {
                        features: rng.random_range(1..=4),
                        frozen: rng.random_bool(0.2),
                    },
                };
            });
        }
        self.tree
            .change_all(&mut |node| node.kept = rng.random_bool(0.5));
    }

    /// Draws whether the model, or a module inside it, is replicated.
    fn draw_replicated(&mut self, rng: &mut StdRng) {
        if rng.random_bool(0.2) {
            let sizes = [[0, 0], [100, 400], [800, 800], [1 << 20, 1 << 20]];
            self.buckets = Some(sizes[rng.random_range(0..4)]);
            // Gradients are reduced over all ranks at once.
            if self.waits == Waits::Scattered {
                self.waits = Waits::Unreduced;
            }
        }
        let children = self.tree.children.iter().enumerate();
        let units: Vec<_> = children
            .filter(|(at, child)| {
                let path = format!("tree.children.{at}");
                child.unit && child.scoped && !self.group().contains(&path)
            })
            .map(|(at, _)| at)
            .collect();
        if !units.is_empty() && rng.random_bool(0.3) {
            self.nested = Some(units[rng.random_range(0..units.len())]);
            if self.waits == Waits::Scattered {
                self.waits = Waits::Unreduced;
            }
        }
    }

    /// Draws what the program calls beside forwards, backwards and steps, and which weights a rank
    /// leaves unused for once.
    fn draw_calls(&mut self, rng: &mut StdRng) {
        self.mode = Mode::draw(rng);
        if rng.random_bool(0.3) {
            let mut draw = || rng.random_bool(0.6);
            self.evaluated = Times {
                before_steps: draw(),
                between_batches: draw(),
                before_backwards: draw(),
            };
        }
        self.resharded = Times::draw_rarely(rng);
        (self.unshards, self.exports) = (rng.random_bool(0.2), rng.random_bool(0.2));
        let (ranks, batches, scoped) =
            (self.ranks(), self.steps * self.batches_a_step, self.scoped);
        if rng.random_bool(0.5) {
            self.tree.change_owned(scoped, &mut |node| {
                if node.used == Used::Everywhere && rng.random_bool(0.4) {
                    node.used =
                        Used::NotOnIn(rng.random_range(0..ranks), rng.random_range(0..batches));
                }
            });
        }
    }

    /// Returns whether a loss depends on a parameter in every micro-batch. Where no unit is around
    /// all others, no rank's loss may depend on a unit that another's does not depend on: then the
    /// tree's own layer is trained by all.
    fn is_sound(&self) -> bool {
        let tree = &self.tree;
        if !self.scoped && self.given != Used::Everywhere {
            return !tree.frozen && tree.used == Used::Everywhere && tree.left_out.is_empty();
        }
        let mut batches = 0..self.steps * self.batches_a_step;
        batches.all(|batch| {
            (0..self.ranks()).any(|rank| {
                self.is_tracked(Run {
                    model: 0,
                    rank,
                    batch,
                })
            })
        })
    }

    /// Returns whether a loss depends on a trained parameter, without the units around.
    pub fn is_tracked(&self, run: Run) -> bool {
        let given = self.given.on(run);
        self.tied || self.tree.tracks(given, given, run)
    }

    /// The first and the last batch of a step.
    pub fn batches_of(&self, step: usize) -> [usize; 2] {
        [
            step * self.batches_a_step,
            (step + 1) * self.batches_a_step - 1,
        ]
    }

    /// Returns whether one of these times is before this micro-batch.
    pub fn is_before(&self, times: Times, batch: usize) -> bool {
        if batch.is_multiple_of(self.batches_a_step) {
            times.before_steps
        } else {
            times.between_batches
        }
    }

    /// The number of data-parallel ranks.
    pub fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }

    fn units(&self) -> Vec<String> {
        let mut units = self.tree.paths("tree", |node| node.unit);
        if self.table_unit {
            units.push("table".into());
        }
        if let Some(child) = self.nested {
            let nested = format!("tree.children.{child}");
            units.retain(|path| !path.starts_with(&nested));
        }
        units
    }

    fn policy(&self) -> MixedPrecisionPolicy {
        let policy = MixedPrecisionPolicy::new();
        let policy = if self.precision.computes_in_half() {
            policy.with_param_dtype(DType::F16)
        } else {
            policy
        };
        if self.precision.reduces_in_half() {
            policy.with_reduce_dtype(DType::F16)
        } else {
            policy
        }
    }

    /// The configuration of a model that is replicated.
    pub fn data_parallel(&self) -> DataParallel {
        self.replicated(self.units())
    }

    pub fn replicated(&self, units: Vec<String>) -> DataParallel {
        let [first, others] = self.buckets.unwrap_or([100, 400]);
        DataParallel::new()
            .with_units(units)
            .with_bucket_bytes(first, others)
            .with_mixed_precision(self.policy())
    }

    /// The child of the tree that is distributed first, the paths of the units inside it, and
    /// whether it is replicated.
    pub fn nested(&self) -> Option<(usize, Vec<String>, bool)> {
        let child = self.nested?;
        let prefix = format!("tree.children.{child}.");
        let units = self.tree.paths("tree", |node| node.unit);
        let inside = units
            .iter()
            .filter_map(|path| Some(path.strip_prefix(&prefix)?.to_owned()));
        Some((child, inside.collect(), self.buckets.is_none()))
    }

    pub fn nested_sharded(&self, units: Vec<String>) -> FullyShard {
        let config = FullyShard::new().with_units(units);
        config
            .with_reshard_after_forward(self.reshard)
            .with_mixed_precision(self.policy())
    }

    pub fn config(&self) -> FullyShard {
        let mut units = self.units();
        let group = self.group();
        units.retain(|path| !group.contains(path));
        let config = FullyShard::new()
            .with_units(units)
            .with_reshard_after_forward(self.reshard);
        let config = if self.offloaded {
            config.with_offload(OffloadPolicy::Cpu)
        } else {
            config
        };
        let config = if group.is_empty() {
            config
        } else {
            config.with_group_unit(group)
        };
        let config = config.with_mixed_precision(self.policy());
        let mut full = self.tree.paths("tree", |node| node.full);
        full.iter_mut()
            .for_each(|path| path.push_str(".layer.weight"));
        if self.full_table {
            full.push("table.weight".into());
        }
        if full.is_empty() && !self.full_biases {
            return config;
        }
        let biases = self.full_biases;
        config.with_shard_placement_fn(move |param: ParamInfo<'_>| {
            let is_full = biases && param.path.ends_with("bias")
                || full.iter().any(|path| path == param.path);
            is_full.then_some(Placement::Replicate)
        })
    }

    /// Returns how tensor-parallel ranks share layers.
    pub fn styles(&self) -> parallel::Plan {
        let with = |plan: parallel::Plan, is: fn(&Node) -> bool, field: &str, style: Style| {
            let layers = self.tree.paths("tree", is).into_iter();
            layers.fold(plan, |plan, path| {
                plan.with_style(format!("{path}.{field}"), style)
            })
        };
        let is_through = |node: &Node| matches!(node.split, Split::Through { .. });
        let plan = with(
            parallel::Plan::new(),
            |node| node.split == Split::Colwise,
            "layer",
            Style::colwise(),
        );
        let plan = with(
            plan,
            |node| node.split == Split::Rowwise,
            "layer",
            Style::rowwise(),
        );
        let plan = with(plan, is_through, "layer", Style::colwise());
        with(plan, is_through, "back", Style::rowwise())
    }

    /// The modules that are one unit.
    fn group(&self) -> Vec<String> {
        let units = self
            .tree
            .children
            .iter()
            .enumerate()
            .filter(|(_, child)| child.unit && child.scoped);
        let paths: Vec<_> = units
            .map(|(at, _)| format!("tree.children.{at}"))
            .take(2)
            .collect();
        if self.grouped && paths.len() == 2 {
            paths
        } else {
            Vec::new()
        }
    }

    /// Smaller plans of the same kind.
    pub fn smaller(&self) -> Vec<Self> {
        let mut all: Vec<Self> = self
            .tree
            .smaller()
            .into_iter()
            .map(|tree| Self {
                tree,
                nested: None,
                ..self.clone()
            })
            .collect();
        let mut add = |change: fn(&mut Self), differs: bool| {
            if differs {
                let mut plan = self.clone();
                change(&mut plan);
                all.push(plan);
            }
        };
        add(|plan| plan.steps = 1, self.steps > 1);
        add(|plan| plan.steps -= 1, self.steps > 2);
        add(
            |plan| plan.kept.fill(Kept::Nothing),
            self.kept.iter().any(|&kept| kept != Kept::Nothing),
        );
        add(
            |plan| plan.kept.fill(Kept::All),
            self.kept.iter().any(|&kept| kept != Kept::All) && self.keeps(),
        );
        add(|plan| plan.adam = false, self.adam);
        add(|plan| plan.batches_a_step = 1, self.batches_a_step > 1);
        add(|plan| plan.batches_a_step -= 1, self.batches_a_step > 2);
        add(
            |plan| plan.waits = Waits::Unreduced,
            self.waits != Waits::Unreduced,
        );
        add(
            |plan| plan.evaluated = Times::NEVER,
            self.evaluated != Times::NEVER,
        );
        add(
            |plan| plan.mode = Mode::Training,
            self.mode != Mode::Training,
        );
        add(|plan| plan.mode = Mode::Valid, self.mode == Mode::Both);
        add(
            |plan| plan.resharded = Times::NEVER,
            self.resharded != Times::NEVER,
        );
        add(
            |plan| plan.resharded.before_steps = false,
            self.resharded.before_steps,
        );
        add(
            |plan| plan.resharded.between_batches = false,
            self.resharded.between_batches,
        );
        add(
            |plan| plan.resharded.before_backwards = false,
            self.resharded.before_backwards,
        );
        add(|plan| plan.unshards = false, self.unshards);
        add(|plan| plan.exports = false, self.exports);
        add(
            |plan| plan.evaluated.before_steps = false,
            self.evaluated.before_steps,
        );
        add(
            |plan| plan.evaluated.between_batches = false,
            self.evaluated.between_batches,
        );
        add(
            |plan| plan.evaluated.before_backwards = false,
            self.evaluated.before_backwards,
        );
        add(|plan| plan.tensor_parallel = 1, self.tensor_parallel > 1);
        add(|plan| plan.models -= 1, self.models > 1);
        add(
            |plan| plan.backwards = Backwards::Joint,
            self.backwards != Backwards::Joint,
        );
        add(
            |plan| plan.precision = Precision::Double,
            self.precision != Precision::Double,
        );
        add(
            |plan| plan.scaling = Scaling::NONE,
            self.scaling != Scaling::NONE,
        );
        add(
            |plan| plan.scaling.sums_forced = false,
            self.scaling.sums_forced,
        );
        add(|plan| plan.buckets = None, self.buckets.is_some());
        add(|plan| plan.nested = None, self.nested.is_some());
        add(
            |plan| plan.grouped = false,
            self.grouped && self.nested.is_none(),
        );
        add(|plan| plan.tied = false, self.tied);
        add(
            |plan| plan.given = Used::Everywhere,
            self.given != Used::Everywhere,
        );
        add(|plan| plan.full_biases = false, self.full_biases);
        add(|plan| plan.full_table = false, self.full_table);
        add(|plan| plan.offloaded = false, self.offloaded);
        add(|plan| plan.checkpointing = false, self.checkpointing);
        add(|plan| plan.table_unit = false, self.table_unit);
        add(
            |plan| plan.batches.fill(2),
            self.batches.iter().any(|&batch| batch != 2),
        );
        all.retain(Self::is_sound);
        all
    }

    /// Returns whether units stay gathered after a backward of any step.
    fn keeps(&self) -> bool {
        self.kept.iter().any(|&kept| kept != Kept::Nothing)
    }
}
