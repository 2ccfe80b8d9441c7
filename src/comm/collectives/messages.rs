//! Point-to-point messages.

use burn::backend::DispatchTensor;
use burn_dtensor_flight::format::Peer;

use crate::comm::backend::{CallSignature, ReceivedTensors};
use crate::comm::{Call, Communicator, Op, TensorMeta, Work, arguments};

impl Communicator {
    /// Sends tensors of any shapes and dtypes to group rank `to`, which may be this rank.
    ///
    /// It never waits for the receiver, so ranks may send in any order. `wait` returns when the
    /// tensors may be reused. Several messages may be in flight; messages with the same sender and
    /// `tag` arrive in order.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// // Around a ring.
    /// launch(Launch::threads(3), |world| {
    ///     let (comm, rank) = (world.all(), world.rank());
    ///     let tensor = Tensor::<1>::full([2], rank as f32, world.device());
    ///     comm.send("ring".into(), vec![tensor.into_dispatch()], (rank + 1) % 3, 0).wait()?;
    ///     let mut message = comm.receive("ring".into(), None, (rank + 2) % 3, 0).wait()?;
    ///     let got = Tensor::<1>::from_dispatch(message.tensors.remove(0));
    ///     assert_eq!(got.sum().into_scalar::<f32>(), 2.0 * message.from as f32);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Not a collective: rank `to` must call [`receive`](Self::receive), and no other rank takes
    /// part.
    pub fn send(&self, call: Call, tensors: Vec<DispatchTensor>, to: usize, tag: u32) -> Work<()> {
        let checked =
            arguments::member("to", to, self.group()).and_then(|()| arguments::sent(&tensors));
        let signatures = accepted!(self.on_own_device(checked, &tensors), self, Op::Send, call);
        let signature = CallSignature::new(Op::Send, &call, signatures);
        let peer = Peer {
            rank: Some(self.group().ranks()[to]),
            tag,
        };
        self.post(Some(peer), call, signature, None, |group, context| {
            group.send(context, tensors, to, tag)
        })
    }

    /// Receives the next message with `tag` from group rank `from`, or from any rank if `from` is
    /// `None`. Returns its tensors and the sender. The label of the message must equal the label of
    /// this call, and its tensors must match `metas` if it is given.
    ///
    /// Several receives may be posted; they match messages in the order in which they were posted.
    ///
    /// # Collective
    /// Not a collective: a rank must call [`send`](Self::send) to this one, and no other rank takes
    /// part.
    pub fn receive(
        &self,
        call: Call,
        metas: Option<Vec<TensorMeta>>,
        from: impl Into<Option<usize>>,
        tag: u32,
    ) -> Work<ReceivedTensors> {
        let from = from.into();
        let checked = from.map_or(Ok(()), |from| arguments::member("from", from, self.group()));
        accepted!(checked, self, Op::Receive, call);
        let described = arguments::all_described(metas.as_deref().unwrap_or_default());
        let signatures = accepted!(described, self, Op::Receive, call);
        let any = metas.is_none();
        let signature = CallSignature {
            any,
            ..CallSignature::new(Op::Receive, &call, signatures)
        };
        let peer = Peer {
            rank: from.map(|from| self.group().ranks()[from]),
            tag,
        };
        self.post(Some(peer), call, signature, Some(0), |group, context| {
            group.receive(context, from, tag, metas)
        })
    }
}
