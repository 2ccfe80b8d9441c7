//! Binary encoding of messages between processes: [`Encode`] and [`Decode`].
//!
//! Integers are encoded with seven bits per byte, in as many bytes as they need. A list begins with its length, an
//! enum with a byte for the variant. There is no version number, because all processes run the same build of one
//! program.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{BoolStore, DType, Shape};

/// A value that can append its encoding to `out`.
pub(super) trait Encode {
    fn encode(&self, out: &mut Vec<u8>);
}

/// A value that can be decoded from the front of `input`, which is advanced. Returns `None` if the bytes are
/// invalid.
pub(super) trait Decode: Sized {
    fn decode(input: &mut &[u8]) -> Option<Self>;
}

/// Implements the encoding of a struct, field by field. Fields after `but` are transferred separately, and decoded
/// as their defaults.
macro_rules! wire_struct {
    ($type:ty { $($field:ident),* $(,)? } $(but { $($left:ident),* })?) => {
        impl Encode for $type {
            fn encode(&self, out: &mut Vec<u8>) {
                $(self.$field.encode(out);)*
            }
        }

        impl Decode for $type {
            fn decode(input: &mut &[u8]) -> Option<Self> {
                Some(Self { $($field: Decode::decode(input)?,)* $($($left: Default::default(),)*)? })
            }
        }
    };
}

/// Implements the encoding of an enum: the number of the variant, then its fields.
macro_rules! wire_enum {
    ($type:ident { $($number:literal $variant:ident { $($field:ident),* }),* $(,)? }) => {
        impl Encode for $type {
            fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        out.push($number);
                        $($field.encode(out);)*
                    })*
                }
            }
        }

        impl Decode for $type {
            fn decode(input: &mut &[u8]) -> Option<Self> {
                match u8::decode(input)? {
                    $($number => Some(Self::$variant { $($field: Decode::decode(input)?),* }),)*
                    _ => None,
                }
            }
        }
    };
}

pub(super) use {wire_enum, wire_struct};

impl Encode for u8 {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(*self);
    }
}

impl Decode for u8 {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        let (first, rest) = input.split_first()?;
        *input = rest;
        Some(*first)
    }
}

impl Encode for u64 {
    #[inline]
    fn encode(&self, out: &mut Vec<u8>) {
        let mut left = *self;
        while left > 0x7f {
            out.push(left as u8 | 0x80);
            left >>= 7;
        }
        out.push(left as u8);
    }
}

impl Decode for u64 {
    #[inline]
    fn decode(input: &mut &[u8]) -> Option<Self> {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = u8::decode(input)?;
            if shift == 63 && byte > 1 {
                return None;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
            shift += 7;
        }
    }
}

/// Implements the encoding of smaller integers as `u64`.
macro_rules! wire_number {
    ($($type:ty),*) => {$(
        impl Encode for $type {
            fn encode(&self, out: &mut Vec<u8>) {
                (*self as u64).encode(out);
            }
        }

        impl Decode for $type {
            fn decode(input: &mut &[u8]) -> Option<Self> {
                u64::decode(input)?.try_into().ok()
            }
        }
    )*};
}

wire_number!(u32, usize);

impl Encode for bool {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl Decode for bool {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        match u8::decode(input)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl Encode for str {
    fn encode(&self, out: &mut Vec<u8>) {
        self.len().encode(out);
        out.extend_from_slice(self.as_bytes());
    }
}

fn text<'a>(input: &mut &'a [u8]) -> Option<&'a str> {
    let len = usize::decode(input)?;
    let (text, rest) = input.split_at_checked(len)?;
    *input = rest;
    std::str::from_utf8(text).ok()
}

impl Encode for String {
    fn encode(&self, out: &mut Vec<u8>) {
        self.as_str().encode(out);
    }
}

impl Decode for String {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        text(input).map(Into::into)
    }
}

impl Decode for Arc<str> {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        text(input).map(Into::into)
    }
}

impl<T: Encode> Encode for [T] {
    fn encode(&self, out: &mut Vec<u8>) {
        self.len().encode(out);
        self.iter().for_each(|value| value.encode(out));
    }
}

impl<T: Encode> Encode for Vec<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        self.as_slice().encode(out);
    }
}

impl<T: Decode> Decode for Vec<T> {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        let len = usize::decode(input)?;
        // A wrong length must not allocate more memory than the remaining bytes justify.
        let mut values = Self::with_capacity(len.min(input.len()));
        for _ in 0..len {
            values.push(T::decode(input)?);
        }
        Some(values)
    }
}

impl<T: Decode> Decode for Arc<[T]> {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        Vec::decode(input).map(Into::into)
    }
}

impl<T: Encode + ?Sized> Encode for &T {
    fn encode(&self, out: &mut Vec<u8>) {
        (**self).encode(out);
    }
}

impl<T: Encode + ?Sized> Encode for Arc<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        (**self).encode(out);
    }
}

impl<T: Encode> Encode for Box<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        (**self).encode(out);
    }
}

impl<T: Decode> Decode for Box<T> {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        T::decode(input).map(Self::new)
    }
}

impl<T: Encode> Encode for Option<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        self.is_some().encode(out);
        if let Some(value) = self {
            value.encode(out);
        }
    }
}

impl<T: Decode> Decode for Option<T> {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        match bool::decode(input)? {
            true => T::decode(input).map(Some),
            false => Some(None),
        }
    }
}

impl<A: Encode, B: Encode, C: Encode> Encode for (A, B, C) {
    fn encode(&self, out: &mut Vec<u8>) {
        self.0.encode(out);
        self.1.encode(out);
        self.2.encode(out);
    }
}

impl<A: Decode, B: Decode, C: Decode> Decode for (A, B, C) {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        Some((A::decode(input)?, B::decode(input)?, C::decode(input)?))
    }
}

impl Encode for Duration {
    fn encode(&self, out: &mut Vec<u8>) {
        self.as_secs().encode(out);
        self.subsec_nanos().encode(out);
    }
}

impl Decode for Duration {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        let (seconds, nanos) = (u64::decode(input)?, u32::decode(input)?);
        (nanos < 1_000_000_000).then(|| Self::new(seconds, nanos))
    }
}

impl Encode for Shape {
    fn encode(&self, out: &mut Vec<u8>) {
        self[..].encode(out);
    }
}

impl Decode for Shape {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        let mut shape = Self::from([0; 0]);
        for _ in 0..usize::decode(input)? {
            shape.push(usize::decode(input)?);
        }
        Some(shape)
    }
}

/// Data types; each is encoded as its index in this list.
const DTYPES: [DType; 16] = [
    DType::F32,
    DType::F64,
    DType::Flex32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
    DType::Bool(BoolStore::Native),
    DType::Bool(BoolStore::U8),
    DType::Bool(BoolStore::U32),
];

impl Encode for DType {
    fn encode(&self, out: &mut Vec<u8>) {
        let at = DTYPES.iter().position(|dtype| dtype == self);
        out.push(at.expect("quantized tensors are rejected when a collective is called") as u8);
    }
}

impl Decode for DType {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        DTYPES.get(usize::from(u8::decode(input)?)).copied()
    }
}
