//! [`ParamStateHandle`]: identity of a parameter's values, by which ranks distinguish clones of a model.
//!
//! Clones of a model share its units. Once an optimizer has stepped one clone, ranks that run the
//! clones in different orders would gather shards of both into one parameter. So the shard of a
//! parameter has a state, which its clones share. Each operation that maps the module (a step,
//! loading a record, a moving average) gives the result a new state. The name of the new state
//! contains that of the old state and the number of the derivation:
//!
//! ```text
//!   model, of `fully_shard`            name 0
//!     ├── student = step(model)        name (0, 1)  ── step ──> ((0, 1), 1)
//!     └── teacher = average(clone)     name (0, 2)
//! ```
//!
//! Names must be equal on all ranks that run the same states. They must not depend on additional
//! clones, visits or maps on one rank, such as those that write a record:
//!
//! * A state has no name until a unit runs with it or another state is derived from it. Then it is
//!   numbered among the states derived earlier from the same state: those that have a name, or that
//!   still exist and may get one.
//! * Mapping a parameter that has not run since the last map, and that has no clone, does not
//!   change its state.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use smallvec::SmallVec;

/// The state of one parameter. Clones of the parameter share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ParamStateHandle(Arc<NamedState>);

/// A reference to a state that does not count as a clone.
pub(super) type WeakState = Weak<NamedState>;

/// State of a parameter, with its name once it has one.
#[derive(Debug, Default)]
pub(super) struct NamedState {
    name: OnceLock<u64>,
    /// The state from which this one was derived, and its number there. Cleared once this state has
    /// a name; `None` for a parameter as `fully_shard` made it.
    from: Mutex<Option<(ParamStateHandle, u64)>>,
    derived: Mutex<DerivedStates>,
}

/// A derived state: its number, the state itself, and its place once it is assigned.
type Other = (u64, Weak<NamedState>, Option<u32>);

/// The states that were derived from one state.
#[derive(Debug, Default)]
struct DerivedStates {
    count: u64,
    /// The last place assigned to a state before those in `others`.
    place: u32,
    /// The states whose places may still matter, in order of their numbers.
    others: SmallVec<[Other; 1]>,
}

impl ParamStateHandle {
    /// Returns the state of a parameter that is mapped from one in this state.
    pub(super) fn mapped(self) -> Self {
        if self.0.name.get().is_none() && Arc::strong_count(&self.0) == 1 {
            return self;
        }
        self.name();
        let mut derived = self.0.derived.lock();
        derived.count += 1;
        let number = derived.count;
        let from = self.clone();
        let next = Arc::new(NamedState {
            from: Mutex::new(Some((from, number))),
            ..NamedState::default()
        });
        derived.prune();
        derived.others.push((number, Arc::downgrade(&next), None));
        Self(next)
    }

    fn name(&self) -> u64 {
        *self.0.name.get_or_init(|| match self.0.from.lock().take() {
            None => 0,
            Some((from, number)) => {
                let mut name = DefaultHasher::new();
                (from.name(), from.0.derived.lock().place_of(number)).hash(&mut name);
                name.finish()
            }
        })
    }

    /// Returns the names of the states of several parameters that run together: a single name if
    /// all are equal.
    pub(super) fn names(states: &[Self]) -> Arc<[u64]> {
        let mut names = states.iter().map(Self::name);
        let first = names.next().unwrap_or_default();
        match names.all(|name| name == first) {
            true => [first].into(),
            false => states.iter().map(Self::name).collect(),
        }
    }

    pub(super) fn downgrade(&self) -> WeakState {
        Arc::downgrade(&self.0)
    }

    pub(super) fn upgrade(state: &WeakState) -> Option<Self> {
        state.upgrade().map(Self)
    }
}

impl DerivedStates {
    /// Assigns a place to the state with this number, and returns it.
    fn place_of(&mut self, number: u64) -> u32 {
        let mut place = self.place + 1;
        for (other, state, given) in &mut self.others {
            match *given {
                _ if *other == number => {
                    *given = Some(place);
                    break;
                }
                Some(given) => place = given + 1,
                None => place += u32::from(state.strong_count() > 0),
            }
        }
        self.prune();
        place
    }

    /// Removes the states on which no place depends any more.
    fn prune(&mut self) {
        self.others
            .retain(|(_, state, given)| given.is_some() || state.strong_count() > 0);
        let given = self
            .others
            .iter()
            .take_while(|(.., given)| given.is_some())
            .count();
        if let Some((.., Some(last))) = self.others.drain(..given).next_back() {
            self.place = last;
        }
        // In a run of states with places, only the last one matters.
        let mut at = 0;
        while at + 1 < self.others.len() {
            match self.others[at].2.is_some() && self.others[at + 1].2.is_some() {
                true => drop(self.others.remove(at)),
                false => at += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_are_in_one_state_until_one_of_them_is_mapped() {
        let model = ParamStateHandle::default();
        let teacher = model.clone();
        assert_eq!(teacher.name(), model.name());
        let student = model.clone().mapped();
        let average = teacher.clone().mapped();
        let names =
            [&model, &student, &average, &student.clone().mapped()].map(ParamStateHandle::name);
        assert!(
            (0..4).all(|a| (0..a).all(|b| names[a] != names[b])),
            "{names:?}"
        );
        assert_eq!(teacher.name(), names[0]);
    }

    #[test]
    fn it_does_not_matter_which_clone_runs_first() {
        let fork = |student_first: bool| {
            let model = ParamStateHandle::default();
            let student = model.clone().mapped();
            let teacher = model.mapped();
            let first = if student_first { &student } else { &teacher };
            first.name();
            [student, teacher].map(|state| state.name())
        };
        assert_eq!(fork(true), fork(false));
        let [student, teacher] = fork(true);
        assert_ne!(student, teacher);
    }

    #[test]
    fn what_one_rank_makes_and_never_runs_does_not_matter() {
        let step = |clones: fn(&ParamStateHandle)| {
            let mut model = ParamStateHandle::default();
            let mut names = Vec::new();
            for _ in 0..3 {
                names.push(model.name());
                clones(&model);
                model = model.mapped();
                clones(&model);
            }
            names
        };
        let names = step(|_| ());
        assert!(names[0] != names[1] && names[1] != names[2]);
        assert_eq!(names, step(|model| drop(model.clone().mapped())));
    }

    #[test]
    fn a_parameter_that_has_not_run_stays_in_its_state() {
        let mapped = ParamStateHandle::default().mapped().mapped();
        assert_eq!(mapped.name(), ParamStateHandle::default().name());
        assert_ne!(mapped.clone().mapped().name(), mapped.name());
    }

    #[test]
    fn places_stay_apart_whatever_goes() {
        let model = ParamStateHandle::default();
        let [a, b, c, d] = [(); 4].map(|()| model.clone().mapped());
        let second = b.name();
        drop(a);
        let names = [second, d.name(), c.name(), model.clone().mapped().name()];
        assert!(
            (0..4).all(|a| (0..a).all(|b| names[a] != names[b])),
            "{names:?}"
        );
        drop((b, c, d));
        for _ in 0..100 {
            model.clone().mapped().name();
        }
        assert!(model.0.derived.lock().others.len() <= 1);
    }

    #[test]
    fn parameters_in_several_states_have_a_name_each() {
        let model = [ParamStateHandle::default(), ParamStateHandle::default()];
        assert_eq!(ParamStateHandle::names(&model)[..], [0]);
        let stepped = model.each_ref().map(|state| state.clone().mapped());
        assert_eq!(ParamStateHandle::names(&stepped).len(), 1);
        let mixed = [model[0].clone(), stepped[1].clone()];
        assert_eq!(ParamStateHandle::names(&mixed)[..], [0, stepped[1].name()]);
    }
}
