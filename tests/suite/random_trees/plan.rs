//! [`Plan`]: a tree of modules, how it is sharded, and how ranks use it. No tensors.

use burn_dtensor::fsdp::{FullyShard, Offload, ParamInfo, ReshardAfterForward};
use burn_dtensor::placement::Placement;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Everything that is drawn about a run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub mesh: Vec<usize>,
    pub reshard: ReshardAfterForward,
    pub checkpointing: bool,
    pub adam: bool,
    pub steps: usize,
    /// Backwards of a step, of which the last reduces what all have added up.
    pub batches_a_step: usize,
    /// Samples of each rank.
    pub batches: Vec<usize>,
    /// Whether the net's own forward is a unit's scope.
    pub scoped: bool,
    /// Whether the table of embeddings is a unit of its own.
    pub table_unit: bool,
    /// Whether the head reads the table of embeddings once more.
    pub tied: bool,
    /// Where what the tree is given depends on the table.
    pub given: Used,
    /// Whether the first two of the tree's children that are units are one.
    pub grouped: bool,
    /// Whether every rank keeps biases whole.
    pub whole_biases: bool,
    /// Whether shards are in host memory.
    pub offloaded: bool,
    pub tree: Node,
}

/// One module: a linear layer, then its children.
#[derive(Debug, Clone)]
pub struct Node {
    /// Whether it is a unit of its own.
    pub unit: bool,
    /// Whether it runs inside `unit`.
    pub scoped: bool,
    /// Whether backward computes it again, if it runs inside `unit`.
    pub recomputed: bool,
    /// Whether its children run one after the other, or side by side.
    pub chain: bool,
    pub frozen: bool,
    pub used: Used,
    /// Whether its layer sees rows in two dimensions: burn records fewer nodes then.
    pub flat: bool,
    /// Whether the towers beside it go on without what it gives: backward does not come by.
    pub unheard: bool,
    /// Whether it runs once more, on what it has given.
    pub twice: bool,
    /// How many operators follow its layer.
    pub tail: usize,
    /// Whether it adds what the tree was given, past all units between.
    pub captures: bool,
    /// Whether it has a factor in single precision beside its layer.
    pub narrow: bool,
    pub children: Vec<Node>,
}

/// On which ranks a layer's weights are read, or something depends on them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Used {
    Everywhere,
    /// Not on this rank.
    NotOn(usize),
    Nowhere,
}

impl Used {
    pub fn on(self, rank: usize) -> bool {
        self == Self::Everywhere || matches!(self, Self::NotOn(other) if other != rank)
    }
}

impl Plan {
    pub fn draw(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mesh = [&[2][..], &[2], &[3], &[4], &[2, 2]][rng.random_range(0..5)].to_vec();
        let ranks = mesh.iter().product();
        let uneven = rng.random_bool(0.4);
        let batches = (0..ranks).map(|_| if uneven { rng.random_range(1..=3) } else { 2 }).collect();
        let few = if mesh == [4] { ReshardAfterForward::Ranks(2) } else { ReshardAfterForward::Always };
        let reshard = [ReshardAfterForward::Always, ReshardAfterForward::Never, ReshardAfterForward::Auto, few];
        let scoped = rng.random_bool(0.6);
        let mut size = 0;
        let tree = Node::draw(&mut rng, ranks, scoped, 0, &mut size);
        // A loss depends on something; and outside any unit ranks are alike.
        let trained = tree.used == Used::Everywhere && !tree.frozen;
        let given = match rng.random_range(0..6) {
            0 if trained && scoped => Used::NotOn(rng.random_range(0..ranks)),
            1 if trained => Used::Nowhere,
            _ => Used::Everywhere,
        };
        let mut plan = Self {
            seed,
            reshard: reshard[rng.random_range(0..4)],
            checkpointing: rng.random_bool(0.3),
            adam: rng.random_bool(0.5),
            steps: rng.random_range(2..=3),
            batches_a_step: if rng.random_bool(0.3) { rng.random_range(2..=3) } else { 1 },
            grouped: scoped && rng.random_bool(0.5),
            batches,
            scoped,
            table_unit: rng.random_bool(0.5),
            tied: rng.random_bool(0.3),
            given,
            whole_biases: rng.random_bool(0.3),
            offloaded: rng.random_bool(0.2),
            tree,
            mesh,
        };
        if rng.random_bool(0.3) {
            plan.tree.narrow(&mut rng);
        }
        plan
    }

    /// The first and the last batch of a step.
    pub fn batches_of(&self, step: usize) -> [usize; 2] {
        [step * self.batches_a_step, (step + 1) * self.batches_a_step - 1]
    }

    pub fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }

    pub fn config(&self) -> FullyShard {
        let mut units = Vec::new();
        self.tree.units("tree", &mut units);
        if self.table_unit {
            units.push("table".into());
        }
        let group = self.group();
        units.retain(|path| !group.contains(path));
        let config = FullyShard::new().units(units).reshard_after_forward(self.reshard);
        let config = if self.offloaded { config.offload(Offload::Cpu) } else { config };
        let config = if group.is_empty() { config } else { config.unit_of(group) };
        let whole = |param: ParamInfo<'_>| param.path.ends_with("bias").then_some(Placement::Replicate);
        if self.whole_biases { config.shard_placement_fn(whole) } else { config }
    }

    /// The modules that are one unit.
    fn group(&self) -> Vec<String> {
        let units = self.tree.children.iter().enumerate().filter(|(_, child)| child.unit && child.scoped);
        let paths: Vec<_> = units.map(|(at, _)| format!("tree.children.{at}")).take(2).collect();
        if self.grouped && paths.len() == 2 { paths } else { Vec::new() }
    }

    /// Smaller plans of the same kind.
    pub fn smaller(&self) -> Vec<Self> {
        let mut all: Vec<Self> = self.tree.smaller().into_iter().map(|tree| Self { tree, ..self.clone() }).collect();
        let mut add = |change: fn(&mut Self), differs: bool| {
            if differs {
                let mut plan = self.clone();
                change(&mut plan);
                all.push(plan);
            }
        };
        add(|plan| plan.steps = 1, self.steps > 1);
        add(|plan| plan.adam = false, self.adam);
        add(|plan| plan.batches_a_step = 1, self.batches_a_step > 1);
        add(|plan| plan.grouped = false, self.grouped);
        add(|plan| plan.tied = false, self.tied);
        add(|plan| plan.given = Used::Everywhere, self.given != Used::Everywhere);
        add(|plan| plan.whole_biases = false, self.whole_biases);
        add(|plan| plan.offloaded = false, self.offloaded);
        add(|plan| plan.checkpointing = false, self.checkpointing);
        add(|plan| plan.table_unit = false, self.table_unit);
        add(|plan| plan.batches.fill(2), self.batches.iter().any(|&batch| batch != 2));
        all
    }
}

impl Node {
    fn draw(rng: &mut StdRng, ranks: usize, owned: bool, depth: usize, size: &mut usize) -> Self {
        *size += 1;
        // Without a unit around all others, units may be in no loss, and what others wait for never comes.
        let unit = rng.random_bool(if depth == 0 { 0.4 } else { 0.7 });
        let scoped = unit && rng.random_bool(0.85);
        // Who skips the read of a weight outside its unit's scope skips a collective.
        let owned = if unit { scoped } else { owned };
        let used = match rng.random_range(0..10) {
            0 if owned => Used::NotOn(rng.random_range(0..ranks)),
            1 if owned => Used::Nowhere,
            _ => Used::Everywhere,
        };
        let children = if depth < 3 { rng.random_range(0..=3) } else { 0 };
        let (chain, frozen, flat) = (rng.random_bool(0.5), rng.random_bool(0.15), rng.random_bool(0.4));
        let unheard = depth > 0 && rng.random_bool(0.25);
        let (tail, captures) = (rng.random_range(0..4), depth > 0 && rng.random_bool(0.2));
        let twice = rng.random_bool(0.15);
        let recomputed = scoped && rng.random_bool(0.25);
        let mut drawn = Vec::new();
        for _ in 0..children {
            if *size < 9 {
                drawn.push(Self::draw(rng, ranks, owned, depth + 1, size));
            }
        }
        Self {
            children: drawn,
            unit,
            scoped,
            recomputed,
            chain,
            frozen,
            used,
            flat,
            unheard,
            twice,
            tail,
            captures,
            narrow: false,
        }
    }

    /// Gives some of its nodes a factor in single precision.
    fn narrow(&mut self, rng: &mut StdRng) {
        self.narrow = rng.random_bool(0.4);
        self.children.iter_mut().for_each(|child| child.narrow(rng));
    }

    /// Whether any node has a factor in single precision.
    pub fn is_narrow(&self) -> bool {
        self.narrow || self.children.iter().any(Self::is_narrow)
    }

    /// The same, computed once.
    pub fn computed_once(&self) -> Self {
        let children = self.children.iter().map(Self::computed_once).collect();
        Self { recomputed: false, children, ..self.clone() }
    }

    fn units(&self, path: &str, units: &mut Vec<String>) {
        if self.unit {
            units.push(path.into());
        }
        for (at, child) in self.children.iter().enumerate() {
            child.units(&format!("{path}.children.{at}"), units);
        }
    }

    fn smaller(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for at in 0..self.children.len() {
            let mut node = self.clone();
            node.children.remove(at);
            all.push(node);
        }
        for (at, child) in self.children.iter().enumerate() {
            all.extend(child.smaller().into_iter().map(|child| {
                let mut node = self.clone();
                node.children[at] = child;
                node
            }));
        }
        let mut add = |change: fn(&mut Self), differs: bool| {
            if differs {
                let mut node = self.clone();
                change(&mut node);
                all.push(node);
            }
        };
        add(|node| node.used = Used::Everywhere, self.used != Used::Everywhere);
        add(|node| node.frozen = false, self.frozen);
        add(|node| node.unheard = false, self.unheard);
        add(|node| node.captures = false, self.captures);
        add(|node| node.narrow = false, self.narrow);
        add(|node| node.twice = false, self.twice);
        add(|node| node.recomputed = false, self.recomputed);
        add(|node| node.tail = 0, self.tail > 0);
        add(|node| node.flat = true, !self.flat);
        all
    }
}
