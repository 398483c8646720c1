"""Tables: rows of CSV and Parquet files as data, and predictions for new ones."""
