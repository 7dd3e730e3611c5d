//! The power fails before each of the operations of the disk, under the whole
//! engine: what was acknowledged is there afterwards, and is delivered.

use std::collections::HashSet;

use super::*;

const REQUESTS: usize = 12;

/// What the outside saw of a life.
#[derive(Default)]
struct Seen {
    /// Requests that were acknowledged, with their content.
    acknowledged: Vec<(Id, String)>,
    /// Requests that were told to be completed.
    completed: Vec<Id>,
    /// Requests that were told to be taken back.
    canceled: Vec<Id>,
}

/// A provider that keeps count of what it was sent under which key.
fn provider(delivery: Delivery) -> Provider {
    let provider = Provider::new(|call| {
        if call.request.method == "POST" {
            Reply::Answers(201, r#"{"id":"tr"}"#)
        } else {
            Reply::Answers(200, r#"{"status":"completed"}"#)
        }
    });
    provider.0.delivery.set(delivery);
    provider
}

/// Requests come alone and in groups, some with keys, one is taken back.
async fn live(life: &mut Life, seen: &RefCell<Seen>) {
    let handle = life.handle.clone();
    let accept = async |n: usize| {
        let body = format!("body {n}");
        let submission =
            if n.is_multiple_of(3) { claiming(&body, &body) } else { submission(&body) };
        if let Ok(accepted) = handle.accept(submission).await {
            let id = accepted.record.id;
            seen.borrow_mut().acknowledged.push((id, body));
            if n == 4
                && let Ok(record) = handle.change(id, Order::Cancel).await
            {
                assert_eq!(record.state, State::Canceled);
                seen.borrow_mut().canceled.push(id);
            }
            handle.settled(id).await;
            if let Ok(Some(view)) = handle.look(id).await
                && view.record.state == State::Completed
            {
                seen.borrow_mut().completed.push(id);
            }
        }
    };
    let all = async {
        let one_by_one = async {
            for n in 0..4 {
                accept(n).await;
            }
        };
        let together = futures_util::future::join_all((4..REQUESTS).map(accept));
        futures_util::future::join(one_by_one, together).await;
    };
    life.during(async {
        let _ = tokio::time::timeout(Duration::from_secs(60), all).await;
    })
    .await;
}

/// What holds when the power is back.
async fn check(disk: &Disk, provider: &Provider, seen: &Seen, what: &str) -> bool {
    let mut life = match Life::begin(disk, provider) {
        Ok(life) => life,
        Err(_) if disk.is_cut() => return false,
        Err(error) => panic!("{what}: {error}"),
    };
    for (id, body) in &seen.acknowledged {
        let request = life.store.request(*id).unwrap();
        assert_eq!(request.map(|request| request.body), Some(body.clone().into()), "{what}");
    }
    for id in &seen.completed {
        let record = life.store.record(*id).unwrap().unwrap();
        assert_eq!(record.state, State::Completed, "{what}");
        assert!(life.store.answer(*id, Kind::Final).unwrap().is_some(), "{what}");
    }
    for id in &seen.canceled {
        assert_eq!(life.store.record(*id).unwrap().unwrap().state, State::Canceled, "{what}");
    }
    life.passes(120).await;
    if disk.is_cut() {
        return false;
    }
    for (id, body) in &seen.acknowledged {
        let record = life.look(*id).await;
        let sent: Vec<_> = provider
            .calls()
            .into_iter()
            .filter(|call| call.key.is_some() && call.request.body == *body)
            .collect();
        let keys: HashSet<_> = sent.iter().map(|call| call.key.clone()).collect();
        assert!(keys.len() <= 1, "{what}: {keys:?}");
        match (record.state, provider.0.delivery.get()) {
            (State::Canceled, _) => assert!(sent.is_empty(), "{what}"),
            (State::Completed, _) => assert!(!sent.is_empty(), "{what}"),
            (State::Stale, Delivery::AtMostOnce) => {}
            (state, delivery) => panic!("{what}: {state} with {delivery:?}"),
        }
        if provider.0.delivery.get() == Delivery::AtMostOnce {
            assert!(sent.len() <= 1, "{what}: sent {} times", sent.len());
        }
    }
    true
}

/// A disk with a store that holds nothing yet.
fn prepared() -> Disk {
    let disk = Disk::new();
    drop(Life::begin(&disk, &provider(Delivery::AtLeastOnce)).unwrap());
    disk.without_power(1)
}

/// One life that ends after `cut` operations, and the next, which may end early too.
async fn cut(delivery: Delivery, cut: u64, again: Option<u64>, seed: u64) -> usize {
    let what = format!("{delivery:?}, cut {cut}, then {again:?}, seed {seed}");
    let (disk, provider, seen) = (prepared(), provider(delivery), RefCell::default());
    disk.cut_after(cut);
    match Life::begin(&disk, &provider) {
        Ok(mut life) => live(&mut life, &seen).await,
        Err(_) => assert!(disk.is_cut(), "{what}"),
    }
    let seen = seen.into_inner();
    let mut found = disk.without_power(seed);
    if let Some(again) = again {
        found.cut_after(again);
        if !check(&found, &provider, &seen, &what).await {
            found = found.without_power(seed + 1);
            assert!(check(&found, &provider, &seen, &what).await);
        }
    } else {
        assert!(check(&found, &provider, &seen, &what).await);
    }
    seen.acknowledged.len()
}

/// Operations of a life without a cut.
async fn whole_life() -> u64 {
    let (disk, provider, seen) = (prepared(), provider(Delivery::AtLeastOnce), RefCell::default());
    let mut life = Life::begin(&disk, &provider).unwrap();
    live(&mut life, &seen).await;
    let seen = seen.into_inner();
    assert_eq!(seen.acknowledged.len(), REQUESTS);
    assert_eq!(seen.canceled.len() + seen.completed.len(), REQUESTS);
    disk.operations()
}

async fn cuts(count: u64, first_seed: u64) {
    let operations = whole_life().await;
    let mut acknowledged = 0;
    for n in 0..count {
        let delivery =
            if n.is_multiple_of(2) { Delivery::AtLeastOnce } else { Delivery::AtMostOnce };
        let at = 1 + n * operations / count;
        let again = (n % 4 >= 2).then_some(1 + n * 7 % 60);
        acknowledged += cut(delivery, at, again, first_seed + n).await;
    }
    println!(
        "{count} cuts of a life of {operations} operations: {acknowledged} acknowledged, 0 lost"
    );
    assert!(acknowledged as u64 > count, "hardly anything was acknowledged");
}

#[tokio::test(start_paused = true)]
async fn what_was_acknowledged_survives_a_loss_of_power() {
    cuts(120, 1).await;
}

#[ignore = "takes minutes; run with --release"]
#[tokio::test(start_paused = true)]
async fn what_was_acknowledged_survives_ten_thousand_losses_of_power() {
    cuts(10_000, 1_000_000).await;
}
