//! [`Comparison`]: the result of [`compare`](fn@super::compare).

use std::fmt;

/// The result of [`compare`](fn@super::compare): equal on all ranks. Print it to read what differs,
/// the likely cause and the remedy.
///
/// ```text
/// the sharded model differs from the full one
///   unit `blocks.1` returns other values: they differ by 4.1e-1 of their magnitude; at most 3.5e-4 is rounding
///   likely cause: forward reads the shape of a stored parameter, which is that of this rank's shard, as in
///   `self.weight.dims()`. Read `self.weight.val().dims()`, or place the parameter as `Replicate`
///   the gradient of `blocks.1.weight` differs by 4.1e-1 of its magnitude
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    pub(super) units: usize,
    pub(super) parameters: usize,
    pub(super) largest: f64,
    pub(super) tolerance: f64,
    pub(super) findings: Vec<Finding>,
}

/// A result of [`compare`](fn@super::compare) other than agreement.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Finding {
    /// A value that must be identical on two ranks is not: a shard on replicas, a replicated or
    /// ignored parameter, or a buffer.
    Replica {
        /// Path of the value.
        param: String,
        /// Global rank that differs; the one outside the majority, if there is a majority.
        rank: usize,
        /// Global rank that `rank` differs from.
        other: usize,
        /// True if most ranks hold the value of `other`. Otherwise either rank may be wrong.
        majority: bool,
    },
    /// A rank panicked.
    Panic {
        /// The innermost unit that was running; `None` outside units and in backward.
        unit: Option<String>,
        /// The model that was running.
        side: Side,
        /// Global rank; the first if several panicked.
        rank: usize,
        /// Text of the panic.
        message: String,
    },
    /// The full model returned other values when it ran a second time, so nothing can be compared.
    Nondeterministic {
        /// The first unit whose output differed; `None` for the loss.
        unit: Option<String>,
    },
    /// Both models ran other units, or in another order.
    Order {
        /// Unit that returned in the sharded model; `None` if the loss was already there.
        sharded: Option<String>,
        /// Unit that returned at the same place in the full model.
        full: Option<String>,
    },
    /// A unit returned a tensor whose shape does not follow from that of the full model.
    Shape {
        /// The unit; `None` for the loss.
        unit: Option<String>,
        /// Shape in the sharded model, of this rank's rows.
        sharded: Vec<usize>,
        /// Shape in the full model, of all ranks' rows.
        full: Vec<usize>,
    },
    /// The first unit that returned other values.
    Output {
        /// The unit; `None` for the loss.
        unit: Option<String>,
        /// Difference, relative to the magnitude of the values.
        relative: f64,
        /// Dependence that makes the difference.
        cause: Cause,
    },
    /// The gradient of a parameter differs.
    Gradient {
        /// Path of the parameter.
        param: String,
        /// Difference, relative to the magnitude of the gradient.
        relative: f64,
    },
}

/// Dependence that makes the output of a unit differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The output depends on the sharding: the full model returns other values for the rows of one
    /// rank, too.
    Shards,
    /// The output depends on the rows of other ranks: for the rows of one rank, the full model
    /// returns the same values as the sharded one.
    Rows,
}

/// One of the two models that [`compare`](fn@super::compare) runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The sharded model, with this rank's rows.
    Sharded,
    /// The full model, with the rows of all ranks.
    Full,
}

impl Comparison {
    /// Returns true if no difference was found.
    pub fn agrees(&self) -> bool {
        self.findings.is_empty()
    }

    /// Returns what differs. See [`compare`](fn@super::compare) for the order.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Returns the number of units whose outputs were compared; 0 if it did not come to that.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Returns the number of parameters whose gradients were compared; 0 if it did not come to
    /// that.
    pub fn parameters(&self) -> usize {
        self.parameters
    }

    /// Returns the largest difference of an output or a gradient, relative to its magnitude.
    pub fn largest(&self) -> f64 {
        self.largest
    }

    /// Returns the largest relative difference that counts as rounding.
    pub fn tolerance(&self) -> f64 {
        self.tolerance
    }
}

/// Maximum number of gradients that the report lists.
const LISTED: usize = 8;

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            units,
            parameters,
            largest,
            tolerance,
            findings,
        } = self;
        match &findings[..] {
            [] => {
                let gradients = match parameters {
                    0 => "no gradients".into(),
                    _ => format!("gradients of {parameters} parameters"),
                };
                return write!(
                    f,
                    "the sharded model agrees with the full one: outputs of {units} units, {gradients}, largest \
                     difference {largest:.1e} of the magnitude; at most {tolerance:.1e} is rounding"
                );
            }
            [Finding::Nondeterministic { .. }] => {
                write!(f, "the sharded model cannot be compared with the full one")?
            }
            _ => write!(f, "the sharded model differs from the full one")?,
        }
        let gradients = findings
            .iter()
            .filter(|difference| matches!(difference, Finding::Gradient { .. }))
            .count();
        for difference in findings
            .iter()
            .take(findings.len() - gradients + LISTED.min(gradients))
        {
            write!(f, "\n  {difference}")?;
            if let Finding::Output { .. } = difference {
                write!(f, "; at most {tolerance:.1e} is rounding")?;
            }
            if let Some(advice) = difference.advice() {
                write!(f, "\n  {advice}")?;
            }
        }
        if gradients > LISTED {
            write!(
                f,
                "\n  and the gradients of {} more parameters",
                gradients - LISTED
            )?;
        }
        Ok(())
    }
}

/// Formats as one line, without the likely cause.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replica {
                param,
                rank,
                other,
                majority,
            } => {
                let most = if *majority {
                    ", which most ranks agree with"
                } else {
                    ""
                };
                write!(
                    f,
                    "rank {rank} holds other values of `{param}` than rank {other}{most}"
                )
            }
            Self::Panic {
                unit,
                side,
                rank,
                message,
            } => {
                let place = unit
                    .as_ref()
                    .map_or("outside units or in backward".into(), |unit| {
                        format!("in unit `{unit}`")
                    });
                write!(
                    f,
                    "the {side} model panicked {place} on rank {rank}: {message}"
                )
            }
            Self::Nondeterministic { unit } => {
                write!(
                    f,
                    "{} returns other values each time it runs",
                    UnitOrLoss(unit)
                )
            }
            Self::Order { sharded, full } => {
                write!(
                    f,
                    "the sharded model ran {} where the full one ran {}",
                    UnitOrLoss(sharded),
                    UnitOrLoss(full)
                )
            }
            Self::Shape {
                unit,
                sharded,
                full,
            } => {
                write!(
                    f,
                    "{} returns a tensor of shape {sharded:?}, and {full:?} for the rows of all ranks",
                    UnitOrLoss(unit)
                )
            }
            Self::Output { unit, relative, .. } => {
                write!(
                    f,
                    "{} returns other values: they differ by {relative:.1e} of their magnitude",
                    UnitOrLoss(unit)
                )
            }
            Self::Gradient { param, relative } => {
                write!(
                    f,
                    "the gradient of `{param}` differs by {relative:.1e} of its magnitude"
                )
            }
        }
    }
}

impl Finding {
    /// Returns the likely cause and the remedy.
    fn advice(&self) -> Option<&'static str> {
        const DTYPE: &str = "likely cause: a tensor that forward makes has another dtype than the tensor that it \
                             meets, which a mixed-precision policy has cast. Make it in that dtype, as in \
                             `Tensor::from_data(data, (&device, x.dtype()))`";
        const STORED: &str = "likely cause: forward reads the shape of a stored parameter, which is that of this \
                              rank's shard, as in `self.weight.dims()`. Read `self.weight.val().dims()`, or place \
                              the parameter as `Replicate`";
        match self {
            Self::Replica { .. } => Some(
                "likely cause: one rank changed it alone, for example under `if rank == 0`. Load or shard the model \
                 again, and make each change on all ranks",
            ),
            Self::Panic { message, .. } if message.contains("dtype") => Some(DTYPE),
            Self::Panic {
                side: Side::Full, ..
            } => None,
            Self::Nondeterministic { .. } => Some(
                "likely cause: `Dropout` or another random draw. Set its probability to 0 for the comparison, or \
                 compare `model.valid()`, of which only the forward is compared",
            ),
            Self::Panic { .. }
            | Self::Shape { .. }
            | Self::Output {
                cause: Cause::Shards,
                ..
            } => Some(STORED),
            Self::Order { .. } => Some(
                "likely cause: forward decides by values of its batch which units to run. Compare it with a batch for \
                 which the decision is the same",
            ),
            Self::Output {
                unit: None,
                cause: Cause::Rows,
                ..
            } => Some(
                "likely cause: the loss is not a mean over rows. Gradients are averaged over the ranks, so use a mean",
            ),
            Self::Output {
                cause: Cause::Rows, ..
            } => Some(
                "likely cause: a layer mixes rows, as `BatchNorm` does, which normalizes by the rank's own batch. Use \
                 a norm that works row by row, such as `GroupNorm`, or a batch norm over a DTensor",
            ),
            Self::Gradient { .. } => None,
        }
    }
}

/// A unit, or the loss.
struct UnitOrLoss<'a>(&'a Option<String>);

impl fmt::Display for UnitOrLoss<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(unit) => write!(f, "unit `{unit}`"),
            None => f.write_str("the loss"),
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sharded => "sharded",
            Self::Full => "full",
        })
    }
}
