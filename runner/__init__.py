"""The engine.

Public are `api`, `cli`, `config.schema`, `errors`, `interfaces`, `precision`, `results`, and the
packages whose classes configs name: `callbacks`, `data`, `launchers`, `optim`, `strategies` and
`sweepers`. Everything else is private: it may change at any time.
"""
