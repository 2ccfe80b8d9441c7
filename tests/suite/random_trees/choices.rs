//! What a plan chooses among, beside its tree.

use rand::Rng;
use rand::rngs::StdRng;

/// The units that stay gathered after a step's backwards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kept {
    Nothing,
    /// Those of the nodes that are [`kept`](Node::kept).
    Some,
    All,
}

impl Kept {
    /// Draws nothing mostly; else the same for all steps, or anew for each.
    pub fn draw(rng: &mut StdRng, steps: usize) -> Vec<Self> {
        if rng.random_bool(0.65) {
            return vec![Self::Nothing; steps];
        }
        let each: Vec<_> = (0..steps)
            .map(|_| [Self::All, Self::All, Self::Some, Self::Nothing][rng.random_range(0..4)])
            .collect();
        if rng.random_bool(0.5) {
            vec![each[0]; steps]
        } else {
            each
        }
    }
}

/// A place where gradients wait for those of a step's last micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Waits {
    /// In their units, unreduced.
    Unreduced,
    /// In their units, reduced over the ranks that shard and not over replicas.
    Scattered,
    /// In the program, reduced.
    Reduced,
}

impl Waits {
    pub fn draw(rng: &mut StdRng, replicates: bool) -> Self {
        match rng.random_range(0..6) {
            0 => Self::Reduced,
            1..3 if replicates => Self::Scattered,
            _ => Self::Unreduced,
        }
    }
}

/// When something is done that trains nothing: forwards that no backward follows, or calls of
/// `reshard`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    pub before_steps: bool,
    pub between_batches: bool,
    /// Between the forward and the backward of every micro-batch.
    pub before_backwards: bool,
}

impl Times {
    pub const NEVER: Self = Self {
        before_steps: false,
        between_batches: false,
        before_backwards: false,
    };

    pub fn draw(rng: &mut StdRng) -> Self {
        let mut draw = || rng.random_bool(0.15);
        Self {
            before_steps: draw(),
            between_batches: draw(),
            before_backwards: draw(),
        }
    }

    /// Draws never mostly.
    pub fn draw_rarely(rng: &mut StdRng) -> Self {
        if rng.random_bool(0.6) {
            return Self::NEVER;
        }
        let mut draw = || rng.random_bool(0.4);
        Self {
            before_steps: draw(),
            between_batches: draw(),
            before_backwards: draw(),
        }
    }
}

/// Mode of the forwards that no backward follows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mode {
    /// As those that train.
    Training,
    /// By `valid()`.
    Valid,
    /// By `valid()`, then as those that train.
    Both,
}

impl Mode {
    pub fn draw(rng: &mut StdRng) -> Self {
        [Self::Training, Self::Valid, Self::Both][rng.random_range(0..3)]
    }

    /// Returns for each forward whether it is by `valid()`.
    pub fn forwards(self) -> &'static [bool] {
        match self {
            Self::Training => &[false],
            Self::Valid => &[true],
            Self::Both => &[true, false],
        }
    }
}

/// The factors and divisors of gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scaling {
    /// A factor of every loss.
    pub loss: f64,
    /// The divisor of sums of gradients; `None`: the number of ranks.
    pub divisor: Option<f64>,
    /// Reductions sum, and divide after.
    pub sums_forced: bool,
}

impl Scaling {
    pub const NONE: Self = Self {
        loss: 1.0,
        divisor: None,
        sums_forced: false,
    };
    /// Divisors, and losses' factors with which gradients stay about as large as they are. Half
    /// precision has no room for the large ones.
    const DRAWN: [(f64, f64); 5] = [
        (0.25, 0.125),
        (3.0, 2.0),
        (1e-6, 1.0 / 2_097_152.0),
        (1e3, 512.0),
        (6.4e7, 33_554_432.0),
    ];
    const DRAWN_IN_HALF: [(f64, f64); 4] =
        [(0.25, 0.125), (3.0, 2.0), (1e3, 512.0), (6.4e7, 16384.0)];

    pub fn draw(rng: &mut StdRng, precision: Precision) -> Self {
        let drawn = if precision == Precision::Double {
            &Self::DRAWN[..]
        } else {
            &Self::DRAWN_IN_HALF
        };
        let (divisor, loss) = drawn[rng.random_range(0..drawn.len())];
        let (divisor, loss) = if rng.random_bool(0.3) {
            (Some(divisor), loss)
        } else {
            (None, 1.0)
        };
        Self {
            loss,
            divisor,
            sums_forced: rng.random_bool(0.2),
        }
    }

    /// Returns what a sum of all ranks' gradients is multiplied by.
    pub fn of_sums(self, ranks: usize) -> f64 {
        1.0 / self.divisor.unwrap_or(ranks as f64)
    }
}

/// The element types of units whose parameters are stored in double precision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Precision {
    Double,
    /// Gradients are reduced in half precision.
    Reduces,
    /// Weights and activations are in half precision.
    Computes,
    /// All of these are in half precision.
    Both,
}

impl Precision {
    pub fn draw(rng: &mut StdRng) -> Self {
        match rng.random_range(0..20) {
            0 => Self::Computes,
            1 => Self::Both,
            2 => Self::Reduces,
            _ => Self::Double,
        }
    }

    pub fn computes_in_half(self) -> bool {
        matches!(self, Self::Computes | Self::Both)
    }

    pub fn reduces_in_half(self) -> bool {
        matches!(self, Self::Reduces | Self::Both)
    }
}

/// The backwards of several models, whose forwards all come before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Backwards {
    /// One, of the sum of all losses.
    Joint,
    /// One of each, in the order of forwards.
    InOrder,
    /// One of each, the last model's first.
    Reversed,
}
