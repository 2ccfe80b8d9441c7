//! Data planes: what ranks contribute to a collective, and how results are built from the
//! contributions of all ranks.
//!
//! | file | content |
//! |---|---|
//! | `contribution` | contribution of a rank |
//! | `inputs` | contributions of all ranks, and the operations that build a result from them |
//! | `host` | copies and reductions in host memory, and results that ranks of a process share |
//! | `device` | packed buffers and kernels of Cube devices |
//! | `payload`, `payload_check` | tensors as bytes for other processes |
//! | `result_buffer` | results into which bytes of other processes are received |

pub(in crate::comm) mod contribution;
#[cfg(feature = "cube")]
pub(in crate::comm) mod device;
#[cfg(feature = "flex")]
pub(in crate::comm) mod host;
pub(in crate::comm) mod inputs;
pub(in crate::comm) mod payload;
pub(in crate::comm) mod payload_check;
pub(in crate::comm) mod result_buffer;
