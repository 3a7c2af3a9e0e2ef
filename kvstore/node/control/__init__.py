"""Operations that the metadata server or an operator orders: drain, migration, retention."""
