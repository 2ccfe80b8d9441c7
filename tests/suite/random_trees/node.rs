//! [`Node`]: one module of a plan's tree, and how ranks use it.

use rand::Rng;
use rand::rngs::StdRng;

/// The most modules of a tree.
const SIZE: usize = 9;

/// One module: a linear layer, then its children.
#[derive(Debug, Clone)]
pub struct Node {
    /// It is a unit of its own.
    pub unit: bool,
    /// It runs inside `unit`.
    pub scoped: bool,
    /// Backward computes it again, if it runs inside `unit`.
    pub recomputed: bool,
    /// True if the children run one after the other; they run side by side otherwise.
    pub chain: bool,
    pub frozen: bool,
    pub used: Used,
    /// The micro-batches in which no rank enters it, nor what is inside: it passes its input on.
    pub left_out: Vec<usize>,
    /// The layer sees rows in two dimensions: burn records fewer nodes then.
    pub flat: bool,
    /// The towers beside it go on without what it gives: backward does not come by.
    pub unheard: bool,
    /// It runs once more, on what it has given.
    pub twice: bool,
    /// The number of operators that follow its layer.
    pub tail: usize,
    /// It adds what the tree was given, past all units between.
    pub captures: bool,
    /// It has a factor in single precision beside its layer.
    pub narrow: bool,
    /// Every data-parallel rank holds its layer's weight whole.
    pub full: bool,
    /// The way in which tensor-parallel ranks share the layer, if there are such.
    pub split: Split,
    /// Tensor-parallel ranks compute its layer with the whole weights, each by itself.
    pub local: bool,
    /// The unit stays gathered after backward, in steps that keep some units.
    pub kept: bool,
    pub children: Vec<Node>,
}

/// The ranks on which a layer's weights are read, or something depends on them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Used {
    Everywhere,
    /// Not on this rank.
    NotOn(usize),
    /// Not on this rank in this micro-batch.
    NotOnIn(usize, usize),
    Nowhere,
}

impl Used {
    pub fn on(self, run: Run) -> bool {
        match self {
            Self::Everywhere => true,
            Self::NotOn(rank) => rank != run.rank,
            Self::NotOnIn(rank, batch) => (rank, batch) != (run.rank, run.batch),
            Self::Nowhere => false,
        }
    }
}

/// The way in which tensor-parallel ranks share a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Split {
    None,
    /// Each has some of its output features.
    Colwise,
    /// Each has some of its input features.
    Rowwise,
    /// The layer has so many output features, perhaps fewer than there are ranks, each of which has
    /// some. A second layer comes back from them, of which each has some of the input features; it
    /// is frozen by itself.
    Through {
        features: usize,
        frozen: bool,
    },
}

/// A forward: the model, the rank that computes it, and the number of its micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub model: usize,
    pub rank: usize,
    pub batch: usize,
}

impl Node {
    pub fn draw(
        rng: &mut StdRng,
        ranks: usize,
        owned: bool,
        depth: usize,
        size: &mut usize,
    ) -> Self {
        *size += 1;
        // Without a unit around all others, units may be in no loss, and what others wait for never
        // comes.
        let unit = rng.random_bool(if depth == 0 { 0.4 } else { 0.7 });
        let scoped = unit && rng.random_bool(0.85);
        // Who skips the read of a weight outside its unit's scope skips a collective.
        let owned = if unit { scoped } else { owned };
        let used = match rng.random_range(0..10) {
            0 if owned => Used::NotOn(rng.random_range(0..ranks)),
            1 if owned => Used::Nowhere,
            _ => Used::Everywhere,
        };
        let children = if depth < 3 {
            rng.random_range(0..=3)
        } else {
            0
        };
        let (chain, frozen, flat) = (
            rng.random_bool(0.5),
            rng.random_bool(0.2),
            rng.random_bool(0.4),
        );
        let unheard = depth > 0 && rng.random_bool(0.25);
        let (tail, captures) = (rng.random_range(0..4), depth > 0 && rng.random_bool(0.2));
        let twice = rng.random_bool(0.15);
        let recomputed = scoped && rng.random_bool(0.25);
        let mut drawn = Vec::new();
        for _ in 0..children {
            if *size < SIZE {
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
            left_out: Vec::new(),
            flat,
            unheard,
            twice,
            tail,
            captures,
            narrow: false,
            full: false,
            split: Split::None,
            local: false,
            kept: false,
        }
    }

    /// Changes this node and all inside.
    pub fn change_all(&mut self, change: &mut impl FnMut(&mut Self)) {
        change(self);
        self.children
            .iter_mut()
            .for_each(|child| child.change_all(change));
    }

    /// Changes this node and all inside that run inside a unit's scope; `owned` if this one does,
    /// where it is no unit.
    pub fn change_owned(&mut self, owned: bool, change: &mut impl FnMut(&mut Self)) {
        let owned = if self.unit { self.scoped } else { owned };
        if owned {
            change(self);
        }
        self.children
            .iter_mut()
            .for_each(|child| child.change_owned(owned, change));
    }

    /// Returns whether any node is so.
    pub fn is_any(&self, is: fn(&Self) -> bool) -> bool {
        is(self) || self.children.iter().any(|child| child.is_any(is))
    }

    /// Returns the sum of a number over all nodes.
    pub fn sum_of(&self, number: &impl Fn(&Self) -> usize) -> usize {
        number(self)
            + self
                .children
                .iter()
                .map(|child| child.sum_of(number))
                .sum::<usize>()
    }

    /// Returns the same tree, computed once.
    pub fn computed_once(&self) -> Self {
        let mut tree = self.clone();
        tree.change_all(&mut |node| node.recomputed = false);
        tree
    }

    /// Returns the paths of the nodes that are so, of which this one's is `path`.
    pub fn paths(&self, path: &str, is: fn(&Self) -> bool) -> Vec<String> {
        let children = self.children.iter().enumerate();
        let inside =
            children.flat_map(|(at, child)| child.paths(&format!("{path}.children.{at}"), is));
        is(self)
            .then(|| path.to_string())
            .into_iter()
            .chain(inside)
            .collect()
    }

    /// Returns whether what it gives depends on a trained parameter, if what it is given does, and
    /// what the tree is given.
    pub fn tracks(&self, input: bool, captured: bool, run: Run) -> bool {
        if self.left_out.contains(&run.batch) {
            return input;
        }
        let is_trained = !self.frozen || matches!(self.split, Split::Through { frozen: false, .. });
        let x = input || self.used.on(run) && is_trained || self.captures && captured;
        if self.chain {
            return self
                .children
                .iter()
                .fold(x, |x, child| child.tracks(x, captured, run));
        }
        let mut heard = self
            .children
            .iter()
            .filter(|child| !child.unheard)
            .peekable();
        if heard.peek().is_none() {
            x
        } else {
            heard.any(|child| child.tracks(x, captured, run))
        }
    }

    /// Returns smaller trees of the same kind.
    pub fn smaller(&self) -> Vec<Self> {
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
        add(
            |node| node.used = Used::Everywhere,
            self.used != Used::Everywhere,
        );
        add(|node| node.left_out.clear(), !self.left_out.is_empty());
        add(|node| node.left_out.truncate(1), self.left_out.len() > 1);
        add(
            |node| drop(node.left_out.drain(..1)),
            self.left_out.len() > 1,
        );
        add(|node| node.frozen = false, self.frozen);
        add(|node| node.unheard = false, self.unheard);
        add(|node| node.captures = false, self.captures);
        add(|node| node.narrow = false, self.narrow);
        add(|node| node.full = false, self.full);
        add(|node| node.kept = false, self.kept);
        add(|node| node.local = false, self.local);
        add(|node| node.split = Split::None, self.split != Split::None);
        add(|node| node.twice = false, self.twice);
        add(|node| node.recomputed = false, self.recomputed);
        add(|node| node.tail = 0, self.tail > 0);
        add(|node| node.flat = true, !self.flat);
        all
    }
}
