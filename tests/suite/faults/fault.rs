//! What one rank does wrong.

use std::ops::ControlFlow;

use burn::tensor::DType;
use burn_dtensor::comm::{CommError, Communicator, World};
use burn_dtensor::{Error, Result};

use super::operation::{Arguments, Operation};

/// What one rank does in the second of three calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Panics,
    Fails,
    Returns,
    OtherOperation,
    OtherOrder,
    OtherShape,
    OtherDtype,
    OtherLabel,
    OneMore,
    OneLess,
}

impl Fault {
    /// A barrier has no tensors.
    pub fn is_possible_in(self, operation: Operation) -> bool {
        operation != Operation::Barrier || ![Self::OtherShape, Self::OtherDtype].contains(&self)
    }
}

/// The second and third of three calls of a rank, which may be at fault in the second. Breaks if
/// its program is to return.
pub fn second_and_third(
    world: &World,
    comm: &Communicator,
    operation: Operation,
    fault: Option<Fault>,
) -> Result<ControlFlow<()>> {
    let call =
        |arguments: Arguments| -> Result<(), CommError> { operation.call(world, comm, arguments) };
    let [second, third] = ["second", "third"].map(Arguments::new);
    match fault {
        None => call(second)?,
        Some(Fault::Panics) => panic!("boom"),
        Some(Fault::Fails) => return Err(Error::other("no such file")),
        Some(Fault::Returns) => return Ok(ControlFlow::Break(())),
        Some(Fault::OtherOperation) => operation.other().call(world, comm, second)?,
        Some(Fault::OtherOrder) => {
            call(third)?;
            call(second)?;
        }
        Some(Fault::OtherShape) => call(Arguments { width: 4, ..second })?,
        Some(Fault::OtherDtype) => call(Arguments {
            dtype: DType::F64,
            ..second
        })?,
        Some(Fault::OtherLabel) => call(Arguments {
            label: "other",
            ..second
        })?,
        Some(Fault::OneMore) => {
            call(second)?;
            call(second)?;
        }
        Some(Fault::OneLess) => {}
    }
    call(third)?;
    Ok(ControlFlow::Continue(()))
}
