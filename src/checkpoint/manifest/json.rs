//! Parts of a manifest's JSON: checksums as digits, and maps in which no key has two values, of
//! which serde's keep one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::{self, Write};
use std::marker::PhantomData;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Checksums as hexadecimal digits, 16 each.
pub(super) struct Checksums<'a>(Cow<'a, [u64]>);

impl<'a> From<&'a [u64]> for Checksums<'a> {
    fn from(checksums: &'a [u64]) -> Self {
        Self(checksums.into())
    }
}

impl Checksums<'_> {
    pub(super) fn into_vec(self) -> Vec<u64> {
        self.0.into_owned()
    }
}

impl Serialize for Checksums<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut digits = String::with_capacity(16 * self.0.len());
        self.0
            .iter()
            .for_each(|checksum| write!(digits, "{checksum:016x}").expect("memory"));
        serializer.serialize_str(&digits)
    }
}

impl<'de> Deserialize<'de> for Checksums<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        let checksums = digits
            .as_bytes()
            .chunks(16)
            .map(|digits| checksum(str::from_utf8(digits).ok()?));
        let checksums: Option<Vec<u64>> = checksums.collect();
        Ok(Self(
            checksums
                .ok_or_else(|| D::Error::custom("checksums are 16 hexadecimal digits each"))?
                .into(),
        ))
    }
}

/// Reads 16 digits, in lower case.
pub(super) fn checksum(digits: &str) -> Option<u64> {
    let valid = digits.len() == 16
        && digits
            .bytes()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    valid.then(|| u64::from_str_radix(digits, 16).expect("valid digits"))
}

/// Deserializes a map in which no key has two values.
pub(crate) fn unique<'de, D, V>(deserializer: D) -> Result<BTreeMap<String, V>, D::Error>
where
    D: Deserializer<'de>,
    V: Deserialize<'de>,
{
    struct Unique<V>(PhantomData<V>);

    impl<'de, V: Deserialize<'de>> Visitor<'de> for Unique<V> {
        type Value = BTreeMap<String, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some(key) = access.next_key::<String>()? {
                match map.entry(key) {
                    Entry::Occupied(entry) => {
                        return Err(A::Error::custom(format_args!(
                            "two values for the key `{}`",
                            entry.key()
                        )));
                    }
                    Entry::Vacant(entry) => _ = entry.insert(access.next_value()?),
                }
            }
            Ok(map)
        }
    }

    deserializer.deserialize_map(Unique(PhantomData))
}
