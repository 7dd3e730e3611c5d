//! Odd requests and answers, and what becomes of them. The file is also played to
//! other proxies, by `tests/real/differential`.

use serde::Deserialize;

use crate::harness::{Reply, Setup, Upstream};

/// One line of `tests/corpus/requests.json`. In its texts every character is one
/// byte.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    send: Send,
    /// The status of each answer, in order.
    answers: Vec<u16>,
    /// Method, target and length of the body of whatever reaches the upstream.
    reached: Vec<String>,
    /// Whether the connection is closed after the answers.
    ends: bool,
    /// What the upstream says; 200 without content if it is missing.
    upstream: Option<String>,
    /// Why other proxies answer otherwise, for the table of the script.
    #[serde(rename = "note")]
    _note: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Send {
    Text(String),
    Pieces(Vec<Piece>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Piece {
    Text(String),
    Repeated(String, usize),
}

fn bytes(text: &str) -> Vec<u8> {
    text.chars().map(|c| u8::try_from(u32::from(c)).unwrap()).collect()
}

impl Send {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Text(text) => bytes(text),
            Self::Pieces(pieces) => pieces
                .iter()
                .flat_map(|piece| match piece {
                    Piece::Text(text) => bytes(text),
                    Piece::Repeated(text, count) => bytes(text).repeat(*count),
                })
                .collect(),
        }
    }
}

#[test]
fn every_odd_request_of_the_corpus_gets_its_verdict() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("../corpus/requests.json")).unwrap();
    let mut wrong = Vec::new();
    for case in &cases {
        let said = bytes(
            case.upstream.as_deref().unwrap_or("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        );
        let upstream = Upstream::scripted(move |received| match received.line() {
            "GET /probe HTTP/1.1" => Reply::Ok("probe"),
            _ => Reply::Bytes(said.clone()),
        });
        let proxy = Setup::before(&upstream).start();
        let mut connection = proxy.connect();
        connection.try_send(case.send.bytes());
        let head_only = case.reached.first().is_some_and(|line| line.starts_with("HEAD "));
        let mut answers = Vec::new();
        for expected in &case.answers {
            let answer = if head_only || *expected == 100 {
                connection.bodyless_answer()
            } else {
                connection.answer()
            };
            answers.push(answer.status);
        }
        if case.ends {
            if !connection.is_ended() {
                wrong.push(format!("{}: it goes on", case.name));
            }
        } else if connection.get("/probe").text() != "probe" {
            wrong.push(format!("{}: the connection is of no more use", case.name));
        }
        let seen = upstream.requests();
        let reached: Vec<String> = seen
            .iter()
            .map(|received| {
                let line = received.line().strip_suffix(" HTTP/1.1").unwrap_or("not HTTP/1.1");
                format!("{line} {}", received.body.len())
            })
            .filter(|line| line != "GET /probe 0")
            .collect();
        if answers != case.answers || reached != case.reached {
            wrong.push(format!("{}: {answers:?}, reached {reached:?}", case.name));
        }
        if upstream.all_bytes().contains("smuggled") {
            wrong.push(format!("{}: it was smuggled", case.name));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(cases.len() > 90);
}
