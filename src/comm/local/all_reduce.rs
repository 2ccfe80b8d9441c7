//! How a rank calls an all-reduce in [`halves`](super::halves).

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Shape;

use super::channel::LocalChannel;
use super::data::{Deposit, Exchange};
use super::halves::{First, Halves};
use super::open::{Left, Open};
use super::outlet::{Outlet, Share, When};
use super::pending::{Joined, Seat};
use crate::comm::ReduceOp;
use crate::comm::engine::{CutPrint, Post, Posted, Print, TensorPrint, reshaped};
use crate::comm::process::wholes::Wholes;
use crate::placement::Cut;

impl LocalChannel {
    /// [`all_reduce`](crate::comm::engine::Channel::all_reduce) in a group of several processes.
    pub(super) fn all_reduce_in_halves(
        &self,
        outlet: &Outlet,
        post: Post,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> Posted<Vec<DispatchTensor>> {
        let shapes: Vec<_> = tensors.iter().map(DispatchTensor::shape).collect();
        let lengths: Vec<_> = shapes.iter().map(Shape::num_elements).collect();
        let cuts: Vec<_> = lengths.iter().map(|len| (0, Cut::Chunks(*len))).collect();
        let rows = tensors.into_iter().zip(&lengths).map(|(tensor, len)| reshaped(tensor, Shape::from([*len])));
        let deposit = Deposit::new(rows.collect()).there(None);
        let device = self.member.home(&deposit.tensors);
        self.note(&deposit);
        let part = |(tensor, (dim, cut)): (&DispatchTensor, &(usize, Cut))| {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            TensorPrint { shape, dtype, cut: Some(CutPrint::new(*dim, cut)), to: None }
        };
        let parts: Vec<_> = deposit.tensors.iter().zip(&cuts).map(part).collect();
        let wholes: Arc<[_]> = parts.into();
        let print = Print { tensors: wholes.clone(), digests: None, ..post.print.clone() };
        let shares = outlet.shares(&deposit, Share::Parts(&cuts));

        let bytes = print.bytes();
        let (member, rendezvous) = (self.member.group.rank(), &self.engine.rendezvous);
        let (ticket, taken, second, second_outlet) = {
            // Both at once: the n-th first half belongs to the n-th second one.
            let mut second = self.second.lock();
            let (key, second_outlet) = second.get_or_insert_with(|| self.second_halves());
            let (ticket, taken) = outlet
                .joined(post.print, shares, When::Now, |print| rendezvous.join(self.key, member, print, deposit))?;
            let (nothing, join) = (second_outlet.nothing(), |print| rendezvous.join_late(*key, member, print));
            let joined = second_outlet.joined(print, nothing, When::Later, join);
            let (second, _) = joined.inspect_err(|_| rendezvous.release(ticket))?;
            (ticket, taken, second, second_outlet.clone())
        };

        let engine = self.engine.clone();
        let first = First { engine, ticket, second, outlet: second_outlet, taken, op, wholes, device: device.clone() };
        let home = device.clone();
        let first = self.engine.leave_open(ticket, Box::new(first));
        let finish = move |deposits: &[Deposit], wholes: Option<&Wholes>| {
            let wholes = Exchange { deposits, member, device: &device, wholes }.joined(shapes.len());
            wholes.into_iter().zip(shapes).map(|(whole, shape)| reshaped(whole, shape)).collect()
        };
        let joined = Joined { seat: Seat::new(self.engine.clone(), second, false), own: None, taken: None, finish };
        let second = if self.is_worth_hands(bytes, &home) {
            self.engine.leave_open(second, Box::new(joined))
        } else {
            Open::new(self.member.rank(), Box::new(joined))
        };
        Ok(Box::new(Halves { first, second: Left(second) }))
    }
}
