//! Data types of burn as data types in files.

use burn::tensor::DType;
use safetensors::Dtype;

use super::manifest::StoredDType;

impl StoredDType {
    /// Returns the data type in which tensors of `dtype` are stored, or `None` for `Flex32` and
    /// quantized ones. Bools are stored as one byte each, whatever burn stores them as.
    pub fn of(dtype: DType) -> Option<Self> {
        let stored = match dtype {
            DType::F64 => Dtype::F64,
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::I64 => Dtype::I64,
            DType::I32 => Dtype::I32,
            DType::I16 => Dtype::I16,
            DType::I8 => Dtype::I8,
            DType::U64 => Dtype::U64,
            DType::U32 => Dtype::U32,
            DType::U16 => Dtype::U16,
            DType::U8 => Dtype::U8,
            DType::Bool(_) => Dtype::BOOL,
            DType::Flex32 | DType::QFloat(_) => return None,
        };
        Some(stored.try_into().expect("elements have a number of bytes"))
    }

    /// Returns burn's data type of the bytes, or `None` if burn has none, as for complex numbers
    /// and floats of 8 bits.
    pub fn dtype(self) -> Option<DType> {
        Some(match self.safetensors() {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            Dtype::I64 => DType::I64,
            Dtype::I32 => DType::I32,
            Dtype::I16 => DType::I16,
            Dtype::I8 => DType::I8,
            Dtype::U64 => DType::U64,
            Dtype::U32 => DType::U32,
            Dtype::U16 => DType::U16,
            Dtype::U8 => DType::U8,
            Dtype::BOOL => DType::Bool(burn::tensor::BoolStore::Native),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::BoolStore;

    use super::*;

    #[test]
    fn dtypes_are_their_own_size_there_and_back() {
        use DType::*;

        let bools = [BoolStore::Native, BoolStore::U8, BoolStore::U32].map(Bool);
        for dtype in [F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8]
            .into_iter()
            .chain(bools)
        {
            let stored = StoredDType::of(dtype).unwrap();
            let back = if dtype.is_bool() {
                Bool(BoolStore::Native)
            } else {
                dtype
            };
            assert_eq!(
                (stored.dtype(), stored.bytes()),
                (Some(back), back.size()),
                "{dtype:?}"
            );
        }
        assert_eq!(StoredDType::of(Flex32), None);
        assert_eq!(StoredDType::try_from(Dtype::F8_E4M3).unwrap().dtype(), None);
    }
}
