//! Messages of other processes in the [`P2pQueue`]. They are announced first, and their data arrives later:
//! invariant 4.

use std::sync::Arc;

use super::{CommError, GroupKey, MatchTable, P2pMessage, P2pQueue, Posted, Signature};

/// Handle of an announced message whose data arrives later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RemoteMessageHandle {
    pub group: GroupKey,
    /// Group rank of the recipient.
    to: usize,
    /// Number of the message, counted over those announced to the recipient.
    number: u64,
}

impl<F, P> P2pQueue<F, P> {
    /// Adds the data of an announced message. Returns the index of the receive that has taken the message, if one
    /// has, and the data as an error if it is not needed.
    fn fill(&mut self, number: u64, part: P) -> Result<Option<usize>, P> {
        let is_it = |posted: &Posted<F, P>| posted.number == Some(number);
        let taken = self.receives.iter().position(|receive| receive.letter.as_ref().is_some_and(is_it));
        let posted = match taken {
            Some(at) => self.receives[at].letter.as_mut(),
            None => self.letters.iter_mut().find(|posted| is_it(posted)),
        };
        let Some(posted) = posted else { return Err(part) };
        posted.letter.part = Some(part);
        Ok(taken)
    }
}

impl<F: Signature, P> MatchTable<F, P> {
    /// Like [`send`](Self::send), for a message of another process whose data [arrives later](Self::fill_letter).
    pub fn announce_letter(
        &mut self,
        group: GroupKey,
        to: usize,
        letter: P2pMessage<F, ()>,
    ) -> Result<RemoteMessageHandle, CommError> {
        let P2pMessage { from, tag, print, part: () } = letter;
        let id = self.message_id(group, from, &print);
        self.enter(group, from, id)?;
        let mail = &mut self.groups[group.0].mail[to];
        mail.announced += 1;
        let number = mail.announced;
        let posted = Posted { letter: P2pMessage { from, tag, print, part: None }, number: Some(number) };
        if let Some(at) = mail.deliver(posted) {
            self.check_letter(group, to, at)?;
        }
        Ok(RemoteMessageHandle { group, to, number })
    }

    /// Adds the data of an announced message. Returns true if a rank may be waiting for it.
    pub fn fill_letter(&mut self, announced: RemoteMessageHandle, part: P) -> bool {
        let RemoteMessageHandle { group, to, number } = announced;
        match self.groups[group.0].mail[to].fill(number, part) {
            Ok(Some(at)) => self.arrived(group, to, at),
            Ok(None) => return false,
            Err(part) => {
                self.freed.push(Arc::from([part]));
                return false;
            }
        }
        true
    }
}
