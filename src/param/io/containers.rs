//! [`TensorTree`] for containers, and for values without tensors that are passed with them.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, Hash};
use std::marker::PhantomData;
use std::ops::{Range, RangeInclusive};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Shape, TensorData};

use super::{TensorMapFn, TensorTree, without_tensors};

impl<T: TensorTree> TensorTree for Option<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.map(|value| value.map_tensors(f))
    }
}

impl<T: TensorTree, E> TensorTree for Result<T, E> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.map(|value| value.map_tensors(f))
    }
}

impl<T: TensorTree> TensorTree for Box<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        Box::new((*self).map_tensors(f))
    }
}

/// Other owners of the value keep the original.
impl<T: TensorTree + Clone> TensorTree for Rc<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        Rc::new(Rc::unwrap_or_clone(self).map_tensors(f))
    }
}

/// Other owners of the value keep the original.
impl<T: TensorTree + Clone> TensorTree for Arc<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        Arc::new(Arc::unwrap_or_clone(self).map_tensors(f))
    }
}

impl<T: TensorTree> TensorTree for Vec<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.into_iter().map(|value| value.map_tensors(f)).collect()
    }
}

impl<T: TensorTree> TensorTree for VecDeque<T> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.into_iter().map(|value| value.map_tensors(f)).collect()
    }
}

impl<T: TensorTree, const N: usize> TensorTree for [T; N] {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.map(|value| value.map_tensors(f))
    }
}

impl<K: Ord, V: TensorTree> TensorTree for BTreeMap<K, V> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        self.into_iter().map(|(key, value)| (key, value.map_tensors(f))).collect()
    }
}

/// Visits entries in the order of the keys. A hash map's own order changes with every rebuild.
impl<K: Hash + Ord, V: TensorTree, S: BuildHasher + Default> TensorTree for HashMap<K, V, S> {
    fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
        let mut entries: Vec<_> = self.into_iter().collect();
        entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        entries.into_iter().map(|(key, value)| (key, value.map_tensors(f))).collect()
    }
}

without_tensors!(
    ['a, T: ?Sized] &'a T, ['a, T: ?Sized] &'a mut T, ['a, T: ?Sized + ToOwned] Cow<'a, T>,
    [] (), [] bool, [] char, [] String, [] f32, [] f64,
    [] u8, [] u16, [] u32, [] u64, [] u128, [] usize, [] i8, [] i16, [] i32, [] i64, [] i128, [] isize,
    [] Shape, [] DType, [] Device, [] TensorData, [] Duration,
    [T] Range<T>, [T] RangeInclusive<T>, [T: ?Sized] PhantomData<T>,
);

macro_rules! tuples {
    ($first:ident $($rest:ident)*) => {
        impl<$first: TensorTree, $($rest: TensorTree),*> TensorTree for ($first, $($rest,)*) {
            #[allow(non_snake_case)]
            fn map_tensors(self, f: TensorMapFn<'_>) -> Self {
                let ($first, $($rest,)*) = self;
                ($first.map_tensors(f), $($rest.map_tensors(f),)*)
            }
        }
        tuples!($($rest)*);
    };
    () => {};
}

tuples!(A B C D E G H I J K L M);
