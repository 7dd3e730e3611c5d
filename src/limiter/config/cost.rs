//! What a request costs, in its three forms.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

use super::super::cost::Cost;
use super::super::tokens::Tokens;
use super::condition::{ConditionConfig, HeaderText};
use super::text::{notation, whole_tokens};
use crate::settings::PathSegment;

/// What one request costs.
#[derive(Clone, Debug)]
pub struct CostConfig(Form);

#[derive(Clone, Debug)]
enum Form {
    Fixed(u64),
    Cases(Vec<Case>),
    Header(FromHeader),
}

/// The cost of the requests that meet a condition.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CostCase")]
struct Case {
    /// The requests; all that is named must hold. Default: all.
    #[serde(default, rename = "match")]
    condition: ConditionConfig,
    /// What each of them costs. Required.
    cost: WholeTokens,
}

/// A cost that a trusted proxy writes into a header.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "HeaderCost")]
struct FromHeader {
    /// The header's name. Required.
    header: HeaderText,
    /// The most that one request costs, and what it costs when the header says
    /// nothing of use. Required.
    max: WholeTokens,
}

#[derive(Clone, Copy, Debug)]
struct WholeTokens(u64);

notation!(
    WholeTokens,
    "a whole number of tokens",
    |text| whole_tokens(&text).map(Self),
    { "type": "integer", "minimum": 1, "maximum": 1_000_000_000_000_u64 }
);

impl Default for CostConfig {
    fn default() -> Self {
        Self(Form::Fixed(1))
    }
}

impl CostConfig {
    /// Whether it is read from a header, which takes a trusted proxy.
    pub const fn is_from_header(&self) -> bool {
        matches!(self.0, Form::Header(_))
    }

    /// The upstreams that its cases name, with their paths from the cost down.
    pub(super) fn upstreams(&self) -> Vec<(Vec<PathSegment>, &str)> {
        let cases = match &self.0 {
            Form::Cases(cases) => cases.as_slice(),
            Form::Fixed(_) | Form::Header(_) => &[],
        };
        let named = cases.iter().enumerate().filter_map(|(index, case)| {
            let path = vec![index.into(), "match".into(), "upstream".into()];
            Some((path, case.condition.upstream()?))
        });
        named.collect()
    }

    /// What a limit makes of it. Every number was checked when it was read.
    pub(super) fn compile(&self) -> Option<Cost> {
        match &self.0 {
            Form::Fixed(cost) => Tokens::from_whole(*cost).map(Cost::Fixed),
            Form::Cases(cases) => cases
                .iter()
                .map(|case| Some((case.condition.compile(), Tokens::from_whole(case.cost.0)?)))
                .collect::<Option<_>>()
                .map(Cost::Cases),
            Form::Header(FromHeader { header, max }) => {
                let max = Tokens::from_whole(max.0)?;
                Some(Cost::Header { name: header.0.clone(), max })
            }
        }
    }

    /// Which requests would never pass a bucket of `burst` tokens, if some would
    /// not.
    pub(super) fn above(&self, burst: u64) -> Option<String> {
        match &self.0 {
            Form::Fixed(cost) => {
                (*cost > burst).then(|| format!("no request would ever pass: each costs {cost}"))
            }
            Form::Cases(cases) => {
                let (index, case) = cases.iter().enumerate().find(|(_, c)| c.cost.0 > burst)?;
                let cost = case.cost.0;
                Some(format!(
                    "no request that meets cost[{index}] would ever pass: it costs {cost}"
                ))
            }
            Form::Header(FromHeader { max, .. }) => (max.0 > burst).then(|| {
                format!(
                    "a request without the header would never pass: it costs the max of {}",
                    max.0
                )
            }),
        }
    }
}

impl<'de> Deserialize<'de> for CostConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyForm;
        impl<'de> Visitor<'de> for AnyForm {
            type Value = CostConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number of tokens, a list of cases, or a header")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<CostConfig, E> {
                whole_tokens(text).map(|cost| CostConfig(Form::Fixed(cost))).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<CostConfig, A::Error> {
                let mut cases = Vec::new();
                while let Some(case) = list.next_element()? {
                    cases.push(case);
                }
                Ok(CostConfig(Form::Cases(cases)))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CostConfig, A::Error> {
                FromHeader::deserialize(MapAccessDeserializer::new(map))
                    .map(|header| CostConfig(Form::Header(header)))
            }
        }
        deserializer.deserialize_any(AnyForm)
    }
}

impl JsonSchema for CostConfig {
    fn schema_name() -> Cow<'static, str> {
        "Cost".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [
                { "type": "integer", "minimum": 1, "maximum": Tokens::MAX_WHOLE, "default": 1 },
                { "type": "array", "items": generator.subschema_for::<Case>() },
                generator.subschema_for::<FromHeader>(),
            ],
        })
    }
}
