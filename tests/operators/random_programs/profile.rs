//! [`Profile`]: the dtypes of a program, and how exact its results are.

use burn::tensor::DType;
use rand::Rng;
use rand::rngs::StdRng;

use super::value::{Data, ElementKind};

/// The dtypes of a program's inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Profile {
    pub float: DType,
    pub int: DType,
}

impl Profile {
    pub fn any(rng: &mut StdRng) -> Self {
        let [f64, f32, bf16] = [DType::F64, DType::F32, DType::BF16];
        let (float, int) = match rng.random_range(0..10) {
            0..3 => (f64, DType::I64),
            3 | 4 => (f64, DType::U8),
            5 => (f64, DType::I32),
            6 => (f32, DType::I32),
            7 => (f32, DType::U8),
            8 => (bf16, DType::I32),
            _ => (bf16, DType::U8),
        };
        Self { float, int }
    }

    /// Returns the dtypes in which results are computed to see what they are before rounding, and
    /// whether they overflow. Bytes stay bytes: where they wrap around, they must in every layout.
    pub fn wide(&self) -> Self {
        Self {
            float: DType::F64,
            int: if self.int == DType::U8 {
                DType::U8
            } else {
                DType::I64
            },
        }
    }

    pub fn dtype(&self, kind: ElementKind) -> DType {
        match kind {
            ElementKind::Float => self.float,
            _ => self.int,
        }
    }

    /// Whether floats are quarters of small whole numbers: all that so narrow a dtype adds and
    /// multiplies without rounding, in any order.
    pub fn is_exact(&self) -> bool {
        self.float == DType::BF16
    }

    /// Returns true if a result can be represented, its terms included, and is far from overflow.
    /// Bytes always can, and may wrap around.
    pub fn holds(&self, data: &Data) -> bool {
        data.values.iter().all(|&value| match data.kind {
            ElementKind::Float if self.is_exact() => {
                (value * 4.0).fract() == 0.0 && value.abs() <= 32.0
            }
            ElementKind::Float => value.is_finite() && value.abs() <= 100.0,
            ElementKind::Int => value.abs() <= 10_000.0,
            ElementKind::Bool => true,
        })
    }

    /// By how much the elements of an input are moved to see whether results jump or run away.
    pub fn noise(&self) -> f64 {
        match self.float {
            DType::F64 => 1e-11,
            _ => 1e-5,
        }
    }

    /// How far results may differ, as a part of the largest of them. What moves by a thousand times
    /// the noise is not used; rounding is ten thousand times below the noise (F64) or a hundred.
    pub fn tolerance(&self) -> f64 {
        match self.float {
            DType::F64 => 1e-9,
            DType::F32 => 1e-3,
            _ => 1.0 / 64.0,
        }
    }
}
