//! Waiting ranks that drive the engine through [`Transport::progress`].

use super::*;

/// Two processes send each other messages in turn, and each calls `progress` while it waits.
#[test]
fn a_thread_that_helps_makes_progress() {
    ProcessTest::new(2).run(|| {
        let courier = start(FragmentLimits::default());
        let told = inbox(&courier);
        let other = 1 - courier.process_index();
        let mut own = 0;
        for turn in 0..200_usize {
            if turn % 2 == courier.process_index() {
                courier.send(other, message("turn", [payload(0, 0, turn * 1000)]));
            }
            while turn % 2 != courier.process_index() {
                let moved = courier
                    .progress()
                    .expect("Debian's Open MPI supports `MPI_THREAD_SERIALIZED`");
                if let Ok(News::Arrived { payloads, .. }) = told.try_recv() {
                    assert_eq!(payloads, [(*payload(0, 0, turn * 1000)).as_ref()]);
                    own += usize::from(moved);
                    break;
                }
            }
        }
        assert!(own > 0, "this thread must receive a message");
        // The progress thread delivers the last message.
    });
}

#[test]
fn invariant_7_a_panic_on_a_thread_that_helps_loses_all() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(FragmentLimits::default());
        let told = inbox(&courier);
        if courier.process_index() == 0 {
            have_the_other_panic(&courier, &told);
        }
        let problem = loop {
            courier.progress();
            if let Ok(News::Lost {
                process: None,
                problem,
            }) = told.try_recv()
            {
                break problem;
            }
        };
        assert_eq!(
            courier.progress(),
            Some(false),
            "nothing is sent or received any more"
        );
        println!("lost: {problem}");
    });
    assert!(
        text.is_none_or(|text| text.contains("lost: the MPI transport panicked: as requested"))
    );
}

#[test]
fn a_process_that_ends_on_a_thread_that_helps_does_so_at_once() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(FragmentLimits::default());
        let _told = inbox(&courier);
        loop {
            // The progress thread may handle some of these messages.
            others(&courier).for_each(|to| courier.send(to, message("exit if helping", [])));
            (0..100).for_each(|_| _ = courier.progress());
        }
    });
    assert!(
        text.is_none_or(|text| text.starts_with("exit status: 3\n") && !text.contains("panicked"))
    );
}
