//! Collectives of objects that serde can serialize, such as configurations, metrics and shapes.
//! They are sent as CBOR in 32-bit words.
//!
//! These methods block until they are complete. Each makes two collectives: one for the lengths and
//! one for the objects. They are meant for small objects; send tensors as tensors, which is faster.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::DType;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::rows::{numbers, numbers_meta, read_numbers, read_words, words_of};
use crate::Result;
use crate::comm::arguments::Problem;
use crate::comm::{Call, CommError, Communicator, Op, ShardedTensor, TensorMeta, Work};
use crate::placement::ShardSizes;

/// Number of bytes in a word.
const WORD: usize = size_of::<i32>();

impl Communicator {
    /// Gathers one object from every rank. Returns them in group order.
    ///
    /// ```
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// launch(Launch::threads(3), |world| {
    ///     let names = world.all().all_gather_object("host".into(), &format!("host {}", world.rank()))?;
    ///     assert_eq!(names, ["host 0", "host 1", "host 2"]);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Communicator`]; [`CommError::InvalidArgument`] on every rank if an object cannot be
    /// serialized, or cannot be deserialized as a `T`.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(
        &self,
        call: Call,
        object: &T,
    ) -> Result<Vec<T>> {
        let op = Op::AllGather;
        let bytes = self.encode(op, &call, object)?;
        let lengths = self.all_gather_numbers(call.clone(), &[bytes.len()])?;
        let parts: Vec<_> = lengths.iter().map(|len| len.div_ceil(WORD)).collect();
        let sizes = ShardSizes::Uneven(parts.clone().into());
        let shard = ShardedTensor {
            tensor: words(&bytes, self),
            dim: 0,
            sizes,
        };
        let all = read_words(self.all_gather(call.clone(), vec![shard]).wait()?.remove(0));
        let mut rest = &all[..];
        parts
            .into_iter()
            .zip(lengths)
            .map(|(part, len)| {
                let (object, others) = rest.split_at(part);
                rest = others;
                self.decode(op, &call, object, len)
            })
            .collect()
    }

    /// Sends an object from group rank `root` to all ranks. `object` is `Some` on the root, and
    /// ignored on the other ranks.
    ///
    /// # Errors
    /// See [`all_gather_object`](Self::all_gather_object).
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        call: Call,
        object: Option<&T>,
        root: usize,
    ) -> Result<T> {
        let op = Op::Broadcast;
        let object = object.filter(|_| self.group().rank() == root);
        let bytes = object
            .map(|object| self.encode(op, &call, object))
            .transpose()?;
        let len = bytes
            .as_ref()
            .map(|bytes| vec![numbers(&[bytes.len()], self)]);
        let len = self
            .broadcast(call.clone(), len, vec![numbers_meta(1)], root)
            .wait()?
            .remove(0);
        let len = read_numbers(len)[0];
        let words = bytes.map(|bytes| vec![words(&bytes, self)]);
        let words = self
            .broadcast(call.clone(), words, vec![words_meta(len)], root)
            .wait()?
            .remove(0);
        self.decode(op, &call, &read_words(words), len)
    }

    /// Gathers one object from every rank on group rank `root`, in group order. The other ranks
    /// receive `None`.
    ///
    /// # Errors
    /// See [`all_gather_object`](Self::all_gather_object).
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        call: Call,
        object: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        let op = Op::Gather;
        let bytes = self.encode(op, &call, object)?;
        let is_root = self.group().rank() == root;
        let metas = is_root.then(|| vec![numbers_meta(1); self.group().size()]);
        let lengths = self
            .gather(call.clone(), numbers(&[bytes.len()], self), metas, root)
            .wait()?;
        let lengths: Option<Vec<_>> =
            lengths.map(|of_ranks| of_ranks.into_iter().flat_map(read_numbers).collect());
        let metas = lengths
            .as_ref()
            .map(|lengths| lengths.iter().map(|len| words_meta(*len)).collect());
        let objects = self
            .gather(call.clone(), words(&bytes, self), metas, root)
            .wait()?;
        let Some((objects, lengths)) = objects.zip(lengths) else {
            return Ok(None);
        };
        objects
            .into_iter()
            .zip(lengths)
            .map(|(words, len)| self.decode(op, &call, &read_words(words), len))
            .collect::<Result<_>>()
            .map(Some)
    }

    /// Sends a different object from group rank `root` to each rank. `objects` contains one per
    /// rank on the root, and is `None` on the other ranks.
    ///
    /// # Errors
    /// See [`all_gather_object`](Self::all_gather_object).
    pub fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        call: Call,
        objects: Option<&[T]>,
        root: usize,
    ) -> Result<T> {
        let op = Op::Scatter;
        let bytes: Option<Vec<Vec<u8>>> = objects
            .map(|objects| {
                objects
                    .iter()
                    .map(|object| self.encode(op, &call, object))
                    .collect()
            })
            .transpose()?;
        let each = |tensor: fn(&Self, &[u8]) -> DispatchTensor| {
            bytes
                .as_ref()
                .map(|bytes| bytes.iter().map(|bytes| tensor(self, bytes)).collect())
        };
        let lengths = each(|comm, bytes| numbers(&[bytes.len()], comm));
        let len = read_numbers(
            self.scatter_list(call.clone(), lengths, numbers_meta(1), root)
                .wait()?,
        )[0];
        let words = self
            .scatter_list(
                call.clone(),
                each(|comm, bytes| words(bytes, comm)),
                words_meta(len),
                root,
            )
            .wait()?;
        self.decode(op, &call, &read_words(words), len)
    }

    /// Sends an object to group rank `to`.
    ///
    /// # Collective
    /// Like [`send`](Self::send): rank `to` must call [`receive_object`](Self::receive_object).
    pub fn send_object<T: Serialize>(
        &self,
        call: Call,
        object: &T,
        to: usize,
        tag: u32,
    ) -> Work<()> {
        match self.encode(Op::Send, &call, object) {
            Ok(bytes) => {
                let tensors = vec![numbers(&[bytes.len()], self), words(&bytes, self)];
                self.send(call, tensors, to, tag)
            }
            Err(error) => Work::failed(error),
        }
    }

    /// Receives the next object with `tag` from group rank `from`, or from any rank if `from` is
    /// `None`. Returns the sender and the object.
    ///
    /// # Collective
    /// Like [`receive`](Self::receive): a rank must call [`send_object`](Self::send_object).
    ///
    /// # Errors
    /// See [`all_gather_object`](Self::all_gather_object).
    pub fn receive_object<T: DeserializeOwned>(
        &self,
        call: Call,
        from: impl Into<Option<usize>>,
        tag: u32,
    ) -> Result<(usize, T)> {
        let message = self.receive(call.clone(), None, from, tag).wait()?;
        let [len, words] = as_object(message.tensors).ok_or_else(|| {
            let problem = format!("the message of rank {} is not an object", message.from);
            self.refused(
                Op::Receive,
                &call,
                Problem {
                    problem,
                    remedy: "Send it with `send_object`",
                },
            )
        })?;
        let object = self.decode(Op::Receive, &call, &read_words(words), read_numbers(len)[0])?;
        Ok((message.from, object))
    }

    fn encode<T: Serialize>(&self, op: Op, call: &Call, object: &T) -> Result<Vec<u8>, CommError> {
        let mut bytes = Vec::new();
        match ciborium::into_writer(object, &mut bytes) {
            Ok(()) => Ok(bytes),
            Err(error) => {
                let problem = format!(
                    "a {} cannot be serialized: {error}",
                    std::any::type_name::<T>()
                );
                Err(self.refused(
                    op,
                    call,
                    Problem {
                        problem,
                        remedy: "Pass a type that serde can serialize",
                    },
                ))
            }
        }
    }

    fn decode<T: DeserializeOwned>(
        &self,
        op: Op,
        call: &Call,
        words: &[i32],
        len: usize,
    ) -> Result<T> {
        let bytes: Vec<u8> = words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .take(len)
            .collect();
        ciborium::from_reader(&bytes[..]).map_err(|error| {
            let problem = format!(
                "the received object is not a {}: {error}",
                std::any::type_name::<T>()
            );
            self.refused(
                op,
                call,
                Problem {
                    problem,
                    remedy: "Use the same type on all ranks",
                },
            )
            .into()
        })
    }

    fn refused(&self, op: Op, call: &Call, problem: Problem) -> CommError {
        match self.refuse::<()>(op, call, problem).wait() {
            Err(error) => error,
            Ok(()) => unreachable!("a rejected call fails"),
        }
    }
}

/// Returns the length and the words of an object, if these are its tensors.
fn as_object(tensors: Vec<DispatchTensor>) -> Option<[DispatchTensor; 2]> {
    let is_words =
        |tensor: &DispatchTensor| tensor.dtype() == DType::I32 && tensor.shape().num_dims() == 1;
    let tensors = <[DispatchTensor; 2]>::try_from(tensors).ok()?;
    (tensors.iter().all(is_words) && tensors[0].shape() == numbers_meta(1).shape).then_some(tensors)
}

/// Creates a tensor of words from bytes, padded with zeros to a multiple of the word size.
fn words(bytes: &[u8], comm: &Communicator) -> DispatchTensor {
    words_of(
        bytes
            .chunks(WORD)
            .map(|bytes| {
                let mut word = [0; WORD];
                word[..bytes.len()].copy_from_slice(bytes);
                i32::from_le_bytes(word)
            })
            .collect(),
        comm,
    )
}

/// Describes the tensor that [`words`] creates from `len` bytes.
fn words_meta(len: usize) -> TensorMeta {
    TensorMeta {
        shape: [len.div_ceil(WORD)].into(),
        dtype: DType::I32,
    }
}
