//! JSON of a manifest where serde's own would lose something: a second value for a key, or the last bits of a number.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::{self, Write};
use std::marker::PhantomData;

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Number, Value, json};

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
        self.0.iter().for_each(|checksum| write!(digits, "{checksum:016x}").expect("memory"));
        serializer.serialize_str(&digits)
    }
}

impl<'de> Deserialize<'de> for Checksums<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        let checksums = digits.as_bytes().chunks(16).map(|digits| checksum(str::from_utf8(digits).ok()?));
        let checksums: Option<Vec<u64>> = checksums.collect();
        Ok(Self(checksums.ok_or_else(|| D::Error::custom("checksums are 16 hexadecimal digits each"))?.into()))
    }
}

/// Reads 16 digits, in lower case.
pub(super) fn checksum(digits: &str) -> Option<u64> {
    let valid = digits.len() == 16 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
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
                    Entry::Occupied(entry) => return Err(twice(entry.key())),
                    Entry::Vacant(entry) => _ = entry.insert(access.next_value()?),
                }
            }
            Ok(map)
        }
    }

    deserializer.deserialize_map(Unique(PhantomData))
}

fn twice<E: Error>(key: &str) -> E {
    E::custom(format_args!("two values for the key `{key}`"))
}

/// Values of a program by key.
pub(super) mod values {
    use super::*;

    pub fn serialize<S: Serializer>(values: &BTreeMap<String, Value>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(values.iter().map(|(key, value)| (key, exact(value))))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Value>, D::Error> {
        let values: BTreeMap<String, Strict> = unique(deserializer)?;
        values.into_iter().map(|(key, value)| Ok((key, read(value.0).map_err(D::Error::custom)?))).collect()
    }
}

/// Values of a program by key, one for each rank.
pub(super) mod rank_values {
    use super::*;

    pub fn serialize<S: Serializer>(values: &BTreeMap<String, Vec<Value>>, serializer: S) -> Result<S::Ok, S::Error> {
        let exact = |values: &Vec<Value>| values.iter().map(exact).collect::<Vec<_>>();
        serializer.collect_map(values.iter().map(|(key, values)| (key, exact(values))))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, Vec<Value>>, D::Error> {
        let values: BTreeMap<String, Vec<Strict>> = unique(deserializer)?;
        let all = |values: Vec<Strict>| values.into_iter().map(|value| read(value.0)).collect::<Result<_, _>>();
        values.into_iter().map(|(key, values)| Ok((key, all(values).map_err(D::Error::custom)?))).collect()
    }
}

/// Key of an object that stands for a number, or for an object with only this key.
const ESCAPE: &str = "f64";

/// Returns the JSON of a value. `serde_json` may read a number with many digits as one of its neighbours, so such a
/// number is written as text: `{"f64":"0.1234567890123456789"}`.
fn exact(value: &Value) -> Value {
    match value {
        Value::Number(number) if !is_read_exactly(number) => json!({ ESCAPE: number.to_string() }),
        Value::Array(values) => values.iter().map(exact).collect(),
        Value::Object(map) => {
            let inner: Value = map.iter().map(|(key, value)| (key.clone(), exact(value))).collect();
            if map.len() == 1 && map.contains_key(ESCAPE) { json!({ ESCAPE: inner }) } else { inner }
        }
        other => other.clone(),
    }
}

fn is_read_exactly(number: &Number) -> bool {
    let bits = |number: &Number| number.as_f64().map(f64::to_bits);
    let read = || serde_json::from_str::<Number>(&number.to_string()).ok();
    !number.is_f64() || read().is_some_and(|read| read.is_f64() && bits(&read) == bits(number))
}

/// Returns the value of what [`exact`] returned.
fn read(json: Value) -> Result<Value, String> {
    let all = |map: Map<String, Value>| -> Result<Value, String> {
        map.into_iter().map(|(key, value)| Ok((key, read(value)?))).collect::<Result<_, _>>().map(Value::Object)
    };
    match json {
        Value::Array(values) => values.into_iter().map(read).collect(),
        Value::Object(mut map) if map.len() == 1 && map.contains_key(ESCAPE) => match map.remove(ESCAPE) {
            Some(Value::Object(inner)) => all(inner),
            Some(Value::String(text)) => {
                let number = text.parse().ok().and_then(Number::from_f64);
                Ok(Value::Number(number.ok_or_else(|| format!("`{text}` is not a finite number"))?))
            }
            _ => Err(format!("an object with only the key `{ESCAPE}` is neither a number nor an object")),
        },
        Value::Object(map) => all(map),
        other => Ok(other),
    }
}

/// A value in which no object has two values for a key.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;

        impl<'de> Visitor<'de> for AnyValue {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_string<E>(self, value: String) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
                let mut values = Vec::new();
                while let Some(Strict(value)) = access.next_element()? {
                    values.push(value);
                }
                Ok(values.into())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
                let mut map = Map::new();
                while let Some(key) = access.next_key::<String>()? {
                    if map.contains_key(&key) {
                        return Err(twice(&key));
                    }
                    let Strict(value) = access.next_value()?;
                    map.insert(key, value);
                }
                Ok(map.into())
            }
        }

        deserializer.deserialize_any(AnyValue).map(Self)
    }
}
